// Actions on jobs and nodes: each needs a confirmation, and a refusal is shown verbatim.

import { ask } from "./api.js";
import { h, say } from "./dom.js";

const job = (name) => `/jobs/${encodeURIComponent(name)}`;
const node = (name) => `/nodes/${encodeURIComponent(name)}`;

export const ACTIONS = {
  suspend: {
    verb: "Suspend",
    words: "It saves, ends its processes, and holds nothing until it is resumed.",
    send: (name) => ask(`${job(name)}/suspend`, { method: "POST" }),
  },
  resume: {
    verb: "Resume",
    words: "It goes on from its last checkpoint as soon as something is free.",
    send: (name) => ask(`${job(name)}/resume`, { method: "POST" }),
  },
  cancel: {
    verb: "Cancel",
    words: "Its processes end. Submitted again under its name, it goes on from its last checkpoint.",
    send: (name) => ask(job(name), { method: "DELETE" }),
    grave: true,
  },
  drain: {
    verb: "Drain",
    words: "Nothing new is put there. Its jobs save and go on elsewhere; those that are not preemptible stay to their end.",
    send: (name, reason) => ask(node(name), { method: "PUT", body: { condition: "draining", reason } }),
    reason: true,
  },
  undrain: {
    verb: "Undrain",
    words: "Jobs are put there again.",
    send: (name) => ask(node(name), { method: "PUT", body: { condition: "ready" } }),
  },
};

/** A button for an action on a job or a node, which runs after a confirmation. */
export function actionButton(kind, name, done) {
  const { verb, grave } = ACTIONS[kind];
  const attributes = { type: "button", class: grave ? "grave" : "", "aria-label": `${verb} ${name}` };
  return h("button", { ...attributes, click: () => confirm(kind, name, done) }, verb);
}

function confirm(kind, name, done) {
  const { verb, words, send, reason, grave } = ACTIONS[kind];
  const why = reason ? h("input", { maxlength: 500, placeholder: "reason, as in: a new disk", "aria-label": "Reason" }) : null;
  const fault = h("p", { class: "fault", role: "alert", hidden: true });
  const no = h("button", { type: "button", click: () => dialog.close() }, "Leave it");
  const yes = h("button", { type: "submit", class: grave ? "grave main" : "main" }, verb);
  const submit = async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      await send(name, why?.value ?? "");
      dialog.close();
      done();
    } catch (error) {
      say(fault, error.message);
      fault.hidden = false;
      yes.disabled = false;
    }
  };
  const dialog = h("dialog", { "aria-labelledby": "question", close: () => dialog.remove() },
    h("form", { submit },
      h("h3", { id: "question" }, `${verb} ${name}?`), h("p", {}, words), why, fault,
      h("p", { class: "buttons" }, no, yes)));
  document.body.append(dialog);
  dialog.showModal();
  (why ?? no).focus();
}

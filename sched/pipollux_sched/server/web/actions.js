// Actions on jobs and nodes: each needs a confirmation, and a refusal is shown verbatim.

import { ask } from "./api.js";
import { h, say } from "./dom.js";

const job = (name) => `/jobs/${encodeURIComponent(name)}`;
const node = (name) => `/nodes/${encodeURIComponent(name)}`;

export const ACTIONS = {
  suspend: {
    verb: "Suspend",
    words: "It saves, ends its processes, and holds no slots until it is resumed.",
    send: (name) => ask(`${job(name)}/suspend`, { method: "POST" }),
  },
  resume: {
    verb: "Resume",
    words: "It resumes from its last checkpoint when slots are free.",
    send: (name) => ask(`${job(name)}/resume`, { method: "POST" }),
  },
  cancel: {
    verb: "Cancel",
    words: "Its processes save and end. If it is submitted again under its name, it resumes from its last checkpoint.",
    send: (name) => ask(job(name), { method: "DELETE" }),
    grave: true,
  },
  drain: {
    verb: "Drain",
    words: "No new replicas are placed on it. Its jobs move to other nodes; jobs that are not preemptible stay until they end.",
    send: (name, reason) => ask(node(name), { method: "PUT", body: { condition: "draining", reason } }),
    reason: true,
  },
  undrain: {
    verb: "Undrain",
    words: "Jobs can be placed on it again.",
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
  const why = reason ? h("input", { maxlength: 500, placeholder: "reason, such as: new disk", "aria-label": "Reason" }) : null;
  const fault = h("p", { class: "fault", role: "alert", hidden: true });
  const no = h("button", { type: "button", click: () => dialog.close() }, "Go back");
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

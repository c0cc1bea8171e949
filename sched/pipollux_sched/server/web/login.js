// The form for the admin token.

import { Refusal, ask, token } from "./api.js";
import { h, say } from "./dom.js";

const WRONG = "This is not a valid token of this scheduler. The admin token is in admin.token in its state directory.";

/** The form; `done()` is called once the scheduler has accepted a token. */
export function login(done, wrong = false) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
  const fault = h("p", { class: "fault", role: "alert", hidden: !wrong }, wrong ? WRONG : "");
  const button = h("button", { type: "submit", class: "main" }, "Open");
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    fault.hidden = true;
    token.keep(field.value.trim());
    try {
      await ask("/nodes");
      done();
      return;
    } catch (error) {
      token.forget();
      say(fault, error instanceof Refusal ? (error.status === 401 ? WRONG : error.message) : "The scheduler does not answer.");
    }
    fault.hidden = false;
    button.disabled = false;
    field.select();
  };
  const form = h("form", { class: "login", submit },
    h("h1", {}, "Pipollux"),
    h("label", { for: "token" }, "Admin token"), h("div", { class: "line" }, field, button), fault,
    h("p", { class: "note" }, "It is in ", h("code", {}, "admin.token"), " in the scheduler's state directory: ",
      h("code", {}, "cat ~/.local/state/pipollux/admin.token"), ". A user's token, created by an admin, works as well. The token is kept until this tab is closed."));
  queueMicrotask(() => field.focus());
  return form;
}

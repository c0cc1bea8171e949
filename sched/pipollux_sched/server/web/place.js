// Where in the page one is: what the address says after its #, so that it can be shared and gone back to.

export const PAGE = 50; // jobs

/** What the address says: { job } or { choice } of the jobs that are listed. */
export function place() {
  const [path, query = ""] = location.hash.slice(1).split("?", 2);
  const [, name] = path.match(/^\/jobs\/([^/]+)$/) ?? [];
  return name ? { job: decoded(name) } : { choice: choiceOf(new URLSearchParams(query)) };
}

function choiceOf(given) {
  return {
    phases: given.getAll("phase"),
    name: given.get("name") ?? "",
    order: given.get("order") ?? "usual",
    descending: given.get("descending") === "true",
    page: Math.max(Number.parseInt(given.get("page") ?? "1", 10) || 1, 1),
  };
}

/** The address of a choice; what is as usual is left out. */
export function address(choice) {
  const query = new URLSearchParams(choice.phases.map((phase) => ["phase", phase]));
  if (choice.name) query.set("name", choice.name);
  if (choice.order !== "usual") query.set("order", choice.order);
  if (choice.descending) query.set("descending", "true");
  if (choice.page > 1) query.set("page", String(choice.page));
  return query.size ? `#/?${query}` : "#/";
}

/** What the scheduler is asked for a choice. */
export function question(choice) {
  const query = new URLSearchParams(address(choice).split("?", 2)[1] ?? "");
  query.delete("page");
  query.set("limit", String(PAGE));
  query.set("offset", String((choice.page - 1) * PAGE));
  return query.toString();
}

/** Go to a choice; `replace`: in the place of the address that is there, without a step to go back. */
export function go(choice, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address(choice));
  dispatchEvent(new Event("hashchange"));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// The page's state in the fragment of its URL, so that it can be shared and is part of the history.

export const PAGE = 50; // jobs

/** Return the state in the address: { job } or { choice } of the listed jobs. */
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

/** Return the address of a choice; defaults are left out. */
export function address(choice) {
  const query = new URLSearchParams(choice.phases.map((phase) => ["phase", phase]));
  if (choice.name) query.set("name", choice.name);
  if (choice.order !== "usual") query.set("order", choice.order);
  if (choice.descending) query.set("descending", "true");
  if (choice.page > 1) query.set("page", String(choice.page));
  return query.size ? `#/?${query}` : "#/";
}

/** Return the scheduler's query for a choice. */
export function question(choice) {
  const query = new URLSearchParams(address(choice).split("?", 2)[1] ?? "");
  query.delete("page");
  query.set("limit", String(PAGE));
  if (!choice.name) query.set("trials", "false"); // a sweep is one line, unless its trials are searched for
  query.set("offset", String((choice.page - 1) * PAGE));
  return query.toString();
}

/** Go to a choice; `replace`: replace the present history entry. */
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

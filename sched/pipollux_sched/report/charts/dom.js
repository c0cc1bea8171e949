// Creation of elements. Data from jobs is inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element: h("a", { href: "#/" }, "text", another). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element in the same way. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an element's text if it has changed, so that focus and selection last. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return the class for a job's colour; none if its number is unknown. */
export function colour(number) {
  return number ? `job-${(number - 1) % 8}` : "";
}

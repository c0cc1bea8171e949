// Making elements. Whatever comes from jobs goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element: h("a", { href: "#/" }, "text", another). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element likewise. */
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

/** Set an element's text if it is another one: what has focus or is selected stays so. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The class that gives an element its job's colour; none where its number is not known. */
export function colour(number) {
  return number ? `job-${(number - 1) % 8}` : "";
}

// Draws openapi.json: a row for each path, with the fields of its body and its answers.
"use strict";

const element = (name, text, ...inside) => {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...inside);
  return made;
};

const table = (names, rows) => {
  const head = element("tr", "", ...names.map((name) => element("th", name)));
  const body = rows.map((row) => element("tr", "", ...row.map((cell) => element("td", cell))));
  const around = element("div", "", element("table", "", head, ...body));
  around.className = "scroll";
  return around;
};

// A schema in a few words: "integer or null", "list of Message".
const kind = (schema) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf || schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(kind).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  return schema.type === "array" ? `list of ${kind(schema.items)}` : String(schema.type ?? "any");
};

const operation = (path, method, about) => {
  const name = element("span", method.toUpperCase());
  name.className = "method";
  const drawn = element("details", "", element("summary", "", name, element("code", path), ` ${about.description ?? ""}`));
  const parameters = about.parameters ?? [];
  if (parameters.length) {
    drawn.append(table(["parameter", "in", "type"], parameters.map((one) => [one.name, one.in, kind(one.schema)])));
  }
  const body = about.requestBody?.content["application/json"].schema;
  if (body) drawn.append(element("p", `Body: ${kind(body)}`));
  const answers = Object.entries(about.responses);
  drawn.append(table(["status", "type", "meaning"], answers.map(
    ([status, one]) => [status, Object.keys(one.content ?? {}).join(", "), one.description])));
  return drawn;
};

const object = (name, about) => {
  const rows = Object.entries(about.properties ?? {}).map(([field, schema]) => [
    field + (about.required?.includes(field) ? " (needed)" : ""), kind(schema),
    schema.default === undefined || schema.default === null ? "" : JSON.stringify(schema.default)]);
  const drawn = element("details", "", element("summary", name));
  if (about.description) drawn.append(element("pre", about.description));
  drawn.append(table(["field", "type", "default"], rows));
  return drawn;
};

const read = async (key) => {
  const answer = await fetch("openapi.json", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  document.getElementById("key").hidden = answer.ok;
  if (!answer.ok) return;
  const api = await answer.json();
  document.getElementById("about").textContent = `${api.info.title} ${api.info.version}: open a path or an object.`;
  const paths = Object.entries(api.paths).flatMap(
    ([path, methods]) => Object.entries(methods).map(([method, about]) => operation(path, method, about)));
  const objects = Object.entries(api.components?.schemas ?? {}).map(([name, about]) => object(name, about));
  document.querySelector("main").replaceChildren(...paths, element("h2", "Objects"), ...objects);
};

document.getElementById("key").addEventListener("submit", (event) => {
  event.preventDefault();
  read(event.target.querySelector("input").value);
});
read("");

"use strict";
// Adds to every call a form that makes it. Everything else of the page works without this.
const keyField = document.getElementById("key");
document.getElementById("key-field").hidden = false;

function field(form, name, hint, element = "input") {
  const label = document.createElement("label");
  label.textContent = name + (hint ? ` (${hint})` : "");
  const input = document.createElement(element);
  input.name = name;
  label.append(input);
  form.append(label);
  return input;
}

function addForm(details) {
  const call = JSON.parse(details.dataset.call);
  const form = document.createElement("form");
  const inPath = call.inPath.map((name) => [name, field(form, name, "path")]);
  inPath.forEach(([, input]) => { input.required = true; });
  const inQuery = call.inQuery.map((name) => [name, field(form, name, "query")]);
  let media, body;
  if (call.media.length) {
    media = field(form, "Content-Type", "", "select");
    call.media.forEach((type) => media.append(new Option(type)));
    body = field(form, "body", "", "textarea");
    body.rows = 6;
  }
  const button = document.createElement("button");
  button.textContent = "Try it";
  const output = document.createElement("pre");
  output.hidden = true;
  output.setAttribute("aria-live", "polite");
  form.append(button);
  details.append(form, output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let path = call.path;
    for (const [name, input] of inPath) path = path.replace(`{${name}}`, encodeURIComponent(input.value));
    const query = new URLSearchParams(inQuery.filter(([, input]) => input.value !== "")
      .map(([name, input]) => [name, input.value])).toString();
    const headers = {};
    if (keyField.value) headers.Authorization = `Bearer ${keyField.value}`;
    if (body && body.value) headers["Content-Type"] = media.value;
    output.hidden = false;
    output.textContent = "…";
    try {
      const response = await fetch(path + (query ? `?${query}` : ""),
        { method: call.method, headers, body: body && body.value ? body.value : undefined });
      const text = await response.text();
      let shown = text;
      try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it is */ }
      output.textContent = `${response.status} ${response.statusText}\n\n${shown}`;
    } catch (error) {
      output.textContent = String(error);
    }
  });
}

document.querySelectorAll("details.call").forEach((details) => {
  details.addEventListener("toggle", () => { if (!details.querySelector("form")) addForm(details); });
});
const wanted = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (wanted && wanted.matches("details")) wanted.open = true;

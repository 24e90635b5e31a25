"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const store = "reading " + data.form;
let rows = [];
let isConfidenceSet = false;
let visibleMilliseconds = 0;
let visibleSince = null;

// without storage the page still works, but a closed window loses the answers
const readStored = () => { try { return JSON.parse(localStorage.getItem(store)) || []; } catch { return []; } };
const writeStored = () => { try { localStorage.setItem(store, JSON.stringify(rows)); } catch { return; } };

const startClock = () => { if (visibleSince === null && !document.hidden) visibleSince = performance.now(); };
const stopClock = () => {
  if (visibleSince !== null) visibleMilliseconds += performance.now() - visibleSince;
  visibleSince = null;
};
document.addEventListener("visibilitychange", () => {
  if (element("reading").hidden || !element("picture").complete) return;
  if (document.hidden) stopClock(); else startClock();
});

const show = (id) => { for (const name of ["start", "reading", "end"]) element(name).hidden = name !== id; };
const chosen = () => document.querySelector("input[name=answer]:checked");

function showCase() {
  if (rows.length === data.cases.length) { show("end"); return; }
  show("reading");
  visibleMilliseconds = 0;
  visibleSince = null;
  isConfidenceSet = false;
  if (chosen()) chosen().checked = false;
  element("confidence").value = 50;
  element("sureness").textContent = "not set";
  element("comment").value = "";
  element("problem").textContent = "";
  element("progress").textContent = `Image ${rows.length + 1} of ${data.cases.length}`;
  const picture = element("picture");
  picture.onload = startClock;
  picture.onerror = () => { element("problem").textContent = "The image is missing. Is this page in its folder?"; };
  picture.src = data.cases[rows.length] + ".png";
  if (rows.length + 1 < data.cases.length) new Image().src = data.cases[rows.length + 1] + ".png";
}

function next() {
  const answer = chosen();
  if (!answer) { element("problem").textContent = "Choose an answer."; return; }
  if (!isConfidenceSet) { element("problem").textContent = "Set how sure you are."; return; }
  stopClock();
  rows.push({ form: data.form, case: data.cases[rows.length], answer: answer.value, confidence: element("confidence").value,
    seconds: (visibleMilliseconds / 1000).toFixed(1), comment: element("comment").value });
  writeStored();
  showCase();
}

const quote = (text) => /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;

function save() {
  const lines = [data.columns, ...rows.map((row) => data.columns.map((name) => quote(String(row[name]))))];
  const blob = new Blob([lines.map((line) => line.join(",") + "\n").join("")], { type: "text/csv" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = data.file;
  link.click();
  URL.revokeObjectURL(link.href);
}

element("begin").addEventListener("click", showCase);
element("next").addEventListener("click", next);
element("save").addEventListener("click", save);
element("confidence").addEventListener("input", () => {
  isConfidenceSet = true;
  element("sureness").textContent = element("confidence").value + " of 100";
});
document.addEventListener("keydown", (event) => {
  if (element("reading").hidden || event.target.id === "comment" || event.ctrlKey || event.metaKey || event.altKey) return;
  const option = document.querySelectorAll("input[name=answer]")[Number(event.key) - 1];
  if (option) option.checked = true;
  if (event.key === "Enter" && event.target.id !== "next") next();
});
rows = readStored();
if (rows.length) {
  element("resume").hidden = false;
  element("resume").textContent = `${rows.length} of ${data.cases.length} images are already answered in this browser.`;
  element("begin").textContent = "Continue";
}

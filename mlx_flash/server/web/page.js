// The page: conversations, answers as they come, and what is asked of the server.

import { Markdown } from "./markdown.js";
import { make, rate, showEngines } from "./state.js";
import { deleteTalk, listTalks, loadTalk, saveTalk, watchOthers } from "./store.js";

const SAVE_MILLISECONDS = 5000; // between saves of an answer that grows
const MAX_PICTURE_BYTES = 20 * 2 ** 20; // as the server allows
const LOST = "The connection to the server was lost. Is it still running?";

const $ = (id) => document.getElementById(id);
const views = new WeakMap(); // messages and their elements
const running = new Map(); // ids of conversations and what stops their answers
let key = sessionStorage.getItem("key") || "";
let talk = newTalk();
let pictures = []; // data URLs that go with the next message

// Server

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) $("key-form").hidden = false;
  return reply;
}

const post = (path, body, signal) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

async function failureOf(reply) {
  const text = await reply.text();
  try { return JSON.parse(text).error.message; } catch { return `${reply.status} ${text}`; }
}

async function listModels() {
  const reply = await ask("v1/models").catch(() => null);
  if (!reply?.ok) return;
  $("key-form").hidden = true;
  const names = (await reply.json()).data.map((model) => model.id);
  $("model").replaceChildren(...names.map((name) => {
    const isPath = name.startsWith("/") || name.startsWith(".");
    const option = make("option", "", isPath ? name.split("/").filter(Boolean).pop() || name : name);
    option.title = name;
    option.value = name;
    return option;
  }));
  chooseModel();
}

function chooseModel() {
  const names = [...$("model").options].map((option) => option.value);
  const wish = [talk.model, localStorage.getItem("model")].find((name) => names.includes(name));
  if (wish) $("model").value = wish;
  showAttach();
}

/** Return whether the chosen model takes pictures. */
async function sees() {
  const model = $("model").value;
  const reply = model && (await post("api/show", { model }).catch(() => null));
  return !!reply?.ok && (await reply.json()).capabilities.includes("vision");
}

async function showAttach() {
  $("attach").hidden = !(await sees());
}

async function look() {
  const reply = await ask("facts").catch(() => null);
  $("lost").hidden = reply !== null;
  if (!reply?.ok) return;
  if (!$("model").options.length) listModels();
  const words = showEngines($("engines"), (await reply.json()).engines);
  $("summary").textContent = words.slice(0, 2).join(" · ");
  $("digest").textContent = words.join(" · ");
}

// Conversations

function newTalk() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "New chat", time: 0, messages: [], settings: {} };
}

function save(which) {
  saveTalk(which).then(showList, (error) => notify(`This conversation is not kept after a reload: ${error.message}`));
}

async function showList() {
  const titles = await listTalks().catch(() => []);
  $("list").replaceChildren(...titles.map(({ id, title }) => {
    const item = make("li"), button = make("button", running.has(id) ? "is-running" : "", title);
    button.type = "button";
    button.addEventListener("click", () => openTalk(id));
    if (id === talk.id) button.setAttribute("aria-current", "true");
    item.append(button);
    return item;
  }));
}

async function openTalk(id) {
  const found = running.get(id)?.talk || (await loadTalk(id).catch(() => undefined));
  const last = found?.messages.at(-1);
  if (last?.isOpen && !running.has(id)) Object.assign(last, { isOpen: false, note: "not completed" }); // the tab was closed
  if (found) show(found);
  if ($("side").matches(":popover-open")) $("side").hidePopover();
}

function show(other) {
  talk = other;
  for (const id of ["system", "temperature", "most"]) $(id).value = talk.settings[id] ?? "";
  chooseModel();
  showMessages();
  showList();
  $("talk").scrollTop = $("talk").scrollHeight;
  $("text").focus();
}

function showMessages() {
  sessionStorage.setItem("talk", talk.id);
  $("log").replaceChildren(...talk.messages.map((message) => viewOf(message).box));
  $("empty").hidden = talk.messages.length > 0;
  $("title").textContent = talk.title;
  document.title = talk.messages.length ? `${talk.title} · mlx-flash` : "mlx-flash";
  const isRunning = running.has(talk.id);
  for (const id of ["export-markdown", "export-json", "delete"]) $(id).disabled = isRunning || !talk.messages.length;
  $("log").setAttribute("aria-busy", String(isRunning));
  $("log").classList.toggle("busy", isRunning);
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
}

// Messages

function viewOf(message) {
  if (!views.has(message)) views.set(message, message.role === "user" ? new Question(message) : new Reply(message));
  return views.get(message);
}

function action(text, name, act) {
  const button = make("button", `quiet ${name}`, text);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}

function pictureOf(url, number) {
  const image = make("img");
  image.src = url;
  image.alt = `Picture ${number}`;
  return image;
}

/** A message of the user. */
class Question {
  constructor(message) {
    this.message = message;
    this.box = make("article", "message user");
    this.show();
  }

  show() {
    const shown = make("div", "pictures"), actions = make("div", "actions"), { content, pictures: urls = [] } = this.message;
    shown.append(...urls.map((url, i) => pictureOf(url, i + 1)));
    actions.append(action("Edit", "edit", () => this.edit()), action("Copy", "", (event) => copy(content, event.target)));
    this.box.replaceChildren(make("h2", "sr", "You"), ...(urls.length ? [shown] : []), make("div", "text", content), actions);
  }

  edit() {
    const form = make("form", "editing"), text = make("textarea"), actions = make("div", "actions");
    text.value = this.message.content;
    text.setAttribute("aria-label", "Edited message");
    const ask = make("button", "button main", "Send");
    actions.append(make("span", "faint", "Messages after this one are removed."), action("Cancel", "", () => this.show()), ask);
    form.append(text, actions);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const urls = this.message.pictures || [];
      if (!(text.value.trim() || urls.length) || running.has(talk.id)) return;
      talk.messages.length = talk.messages.indexOf(this.message);
      say(text.value.trim(), urls);
    });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show();
      else sendOnEnter(event, form);
    });
    text.addEventListener("input", () => fit(text));
    this.box.replaceChildren(form);
    fit(text);
    text.focus();
  }
}

/** A message of the model. */
class Reply {
  constructor(message) {
    this.message = message;
    this.box = make("article", "message assistant");
    this.thought = make("details", "thought");
    this.summary = make("summary");
    this.reasoning = make("div");
    this.thought.append(this.summary, this.reasoning);
    const text = make("div", "text");
    this.text = new Markdown(text);
    this.foot = make("span", "foot");
    this.error = make("p", "error");
    this.error.setAttribute("role", "alert");
    const actions = make("div", "actions");
    this.copy = action("Copy", "", (event) => copy(this.message.content, event.target));
    actions.append(this.foot, this.copy, action("Regenerate", "again", again));
    this.box.append(make("h2", "sr", "Answer"), this.thought, text, this.error, actions);
    this.show(false);
  }

  show(isGrowing) {
    const { content, reasoning, seconds, note, error } = this.message;
    this.thought.hidden = !reasoning;
    this.summary.textContent = seconds === undefined ? "Reasoning" : `Reasoned for ${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
    this.reasoning.textContent = reasoning;
    this.text.show(content, isGrowing);
    this.foot.textContent = note;
    this.error.hidden = !error;
    this.error.textContent = error;
    this.copy.hidden = !content;
  }
}

function keepAtEnd(change) {
  const box = $("talk");
  const stay = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (stay) box.scrollTop = box.scrollHeight;
}

async function copy(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else { // browsers have it for https and this machine only
    const area = make("textarea", "sr");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const words = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = words; }, 1500);
}

function notify(text) {
  $("notice").textContent = text;
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => { $("notice").textContent = ""; }, 8000);
}

// Answers

/** Return the conversation as the API takes it, without messages that got no answer. */
function requestOf({ messages, settings }) {
  const isFailed = (message) => message?.role === "assistant" && !message.content;
  const kept = messages.filter((message, i) => !isFailed(message) && !isFailed(messages[i + 1]));
  const sent = kept.map(({ role, content, pictures: urls = [] }) => {
    const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: urls.length ? [...parts, ...(content ? [{ type: "text", text: content }] : [])] : content };
  });
  const system = (settings.system || "").trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    ...(settings.temperature ? { temperature: Number(settings.temperature) } : {}),
    ...(settings.most ? { max_tokens: Number(settings.most) } : {}),
  };
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    yield* lines;
  }
}

/** Take a stream of an answer into its message, and call a function after each change. */
async function receive(body, message, changed) {
  const start = performance.now();
  let first = 0, last = 0, usage = null, reason = "";
  for await (const line of linesOf(body)) {
    const [, stage, done, total] = /^: (\w+) (\d+)\/(\d+)/.exec(line) || [];
    if (stage && !first) {
      const share = Number(total) ? ` ${Math.round((100 * done) / total)} %` : "";
      message.note = (stage === "loading" ? "Loading the model" : "Reading the prompt") + share;
      changed();
    }
    if (!line.startsWith("data: {")) continue;
    const part = JSON.parse(line.slice(6));
    if (part.error) throw new Error(part.error.message);
    usage = part.usage || usage;
    const { delta = {}, finish_reason: end } = part.choices?.[0] || {};
    reason = end || reason;
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (!delta.content && !thought) continue;
    last = performance.now();
    first = first || last;
    if (delta.content && message.reasoning && message.seconds === undefined) message.seconds = (last - start) / 1000;
    message.content += delta.content || "";
    message.reasoning += thought || "";
    message.note = delta.content ? "Answering" : "Reasoning";
    changed();
  }
  if (!reason) throw new Error(LOST);
  const words = [], seconds = (last - first) / 1000, { completion_tokens: count, prompt_tokens: length } = usage || {};
  if (usage) {
    const kept = usage.prompt_tokens_details?.cached_tokens;
    words.push(`${count} tokens`);
    if (count > 1 && seconds > 0) words.push(`${rate((count - 1) / seconds)} tokens/s`);
    words.push(`prompt ${length}${kept ? ` (${kept} kept)` : ""}`);
  }
  if (reason === "length") words.push("cut at the most tokens");
  message.note = words.join(" · ");
}

async function answer(own) {
  const message = { role: "assistant", content: "", reasoning: "", note: "Waiting for the server", error: "", isOpen: true };
  const stopper = new AbortController(), view = viewOf(message), body = requestOf(own);
  let timer = 0, cost = 0, saved = performance.now();
  const draw = () => {
    const start = performance.now();
    keepAtEnd(() => view.show(true));
    if (start - saved > SAVE_MILLISECONDS) {
      save(own);
      saved = start;
    }
    cost = performance.now() - start;
    timer = 0;
  };
  own.messages.push(message);
  own.time = Date.now();
  running.set(own.id, { talk: own, stopper });
  save(own);
  showMessages();
  $("talk").scrollTop = $("talk").scrollHeight;
  try {
    const options = { model: own.model, stream: true, stream_options: { include_usage: true } };
    const reply = await post("v1/chat/completions", { ...body, ...options }, stopper.signal);
    if (!reply.ok) throw new Error(await failureOf(reply));
    await receive(reply.body, message, () => { timer = timer || setTimeout(draw, 16 + 4 * cost); });
  } catch (error) {
    message.note = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") message.error = error instanceof TypeError ? LOST : error.message;
  }
  clearTimeout(timer);
  running.delete(own.id);
  delete message.isOpen;
  keepAtEnd(() => view.show(false));
  save(own);
  if (own === talk) showMessages();
}

function say(content, urls) {
  if (!talk.messages.length) talk.title = content.replace(/\s+/g, " ").slice(0, 60) || "Picture";
  talk.messages.push({ role: "user", content, ...(urls.length ? { pictures: urls } : {}) });
  talk.model = $("model").value || "default_model";
  answer(talk);
}

function again() {
  if (running.has(talk.id)) return;
  talk.messages.pop();
  talk.model = $("model").value || "default_model";
  answer(talk);
}

// Composer

function send(event) {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!(text || pictures.length) || running.has(talk.id)) return;
  say(text, pictures);
  pictures = [];
  showPictures();
  $("text").value = "";
  fit($("text"));
}

function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

function fit(text) {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

async function addPictures(files) {
  if (!(await sees())) {
    notify("This model takes no pictures here. One that sees does, if the server was started with --vision.");
    return;
  }
  for (const file of files) {
    if (!/^image\/(png|jpeg|webp|gif|bmp|tiff)$/.test(file.type)) notify(`${file.name} is no PNG, JPEG, WebP, GIF, BMP or TIFF file.`);
    else if (file.size > MAX_PICTURE_BYTES) notify(`${file.name} has more than 20 MiB.`);
    else {
      pictures.push(await new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
      }));
    }
  }
  showPictures();
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, i) => {
    const button = action("", "picture", () => {
      pictures.splice(i, 1);
      showPictures();
      $("text").focus();
    });
    button.setAttribute("aria-label", `Remove picture ${i + 1}`);
    button.append(pictureOf(url, i + 1));
    return button;
  }));
}

// Export

function download(text, kind, ending) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = `${talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function markdownOf({ title, model, messages, settings }) {
  const parts = [`# ${title}`, `Model: ${model}`];
  if (settings.system) parts.push("## System", settings.system);
  for (const { role, content, reasoning, pictures: urls = [] } of messages) {
    parts.push(role === "user" ? "## You" : "## Answer", ...urls.map((url, i) => `![Picture ${i + 1}](${url})`));
    if (reasoning) parts.push("<details><summary>Reasoning</summary>", reasoning, "</details>");
    parts.push(content);
  }
  return `${parts.join("\n\n")}\n`;
}

// Events

$("write").addEventListener("submit", send);
$("text").addEventListener("input", () => fit($("text")));
$("text").addEventListener("keydown", (event) => sendOnEnter(event, $("write")));
$("stop").addEventListener("click", () => running.get(talk.id)?.stopper.abort());
document.addEventListener("keydown", (event) => {
  const isTaken = document.querySelector(":popover-open") || event.target.closest(".editing") || event.isComposing;
  if (event.key === "Escape" && !isTaken) running.get(talk.id)?.stopper.abort();
});
$("log").addEventListener("click", (event) => {
  if (event.target.matches(".copy-code")) copy(event.target.closest(".code").querySelector("code").textContent, event.target);
});
$("fresh").addEventListener("click", () => {
  if ($("side").matches(":popover-open")) $("side").hidePopover();
  show({ ...newTalk(), settings: { ...talk.settings } });
});
$("model").addEventListener("change", () => {
  localStorage.setItem("model", $("model").value);
  showAttach();
});
for (const id of ["system", "temperature", "most"]) {
  $(id).addEventListener("input", () => { talk.settings[id] = $(id).value; });
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  listModels();
  look();
});

$("files").addEventListener("change", () => {
  addPictures([...$("files").files]);
  $("files").value = "";
});
$("text").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length || event.clipboardData.getData("text/plain")) return; // spreadsheets give both
  event.preventDefault();
  addPictures([...event.clipboardData.files]);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("write").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") addPictures([...event.dataTransfer.files]);
  });
}

$("menu").addEventListener("click", () => $("menu").hidePopover());
$("export-markdown").addEventListener("click", () => download(markdownOf(talk), "text/markdown", "md"));
$("export-json").addEventListener("click", () => download(`${JSON.stringify(talk, null, 2)}\n`, "application/json", "json"));
$("delete").addEventListener("click", async () => {
  if (!confirm(`Delete "${talk.title}"?`)) return;
  await deleteTalk(talk.id);
  show(newTalk());
});
watchOthers((id) => {
  if (id === talk.id && !running.has(id)) openTalk(id);
  showList();
});

const wide = matchMedia("(min-width: 60rem)");
wide.addEventListener("change", () => { if ($("side").matches(":popover-open")) $("side").hidePopover(); });
listModels();
await openTalk(sessionStorage.getItem("talk") || "");
await showList();
showMessages();
for (;;) {
  if (!document.hidden) await look();
  await new Promise((done) => setTimeout(done, 1000));
}

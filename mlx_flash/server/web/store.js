// Conversations in the browser's IndexedDB. It belongs to the address and port of this server.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("mlx-flash", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("talks", { keyPath: "id" });
    request.result.createObjectStore("titles", { keyPath: "id" }); // the list needs no pictures
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
opened.catch(() => {}); // each call below reports it
const others = new BroadcastChannel("mlx-flash talks");

async function run(mode, act) {
  const transaction = (await opened).transaction(["talks", "titles"], mode);
  return new Promise((resolve, reject) => {
    const request = act(transaction.objectStore("talks"), transaction.objectStore("titles"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Return id, title and time of all conversations, the newest first. */
export async function listTalks() {
  const titles = await run("readonly", (talks, titles) => titles.getAll());
  return titles.sort((a, b) => b.time - a.time);
}

export const loadTalk = (id) => run("readonly", (talks) => talks.get(id));

export async function saveTalk(talk) {
  await run("readwrite", (talks, titles) => {
    talks.put(talk);
    return titles.put({ id: talk.id, title: talk.title, time: talk.time });
  });
  others.postMessage(talk.id);
}

export async function deleteTalk(id) {
  await run("readwrite", (talks, titles) => {
    talks.delete(id);
    return titles.delete(id);
  });
  others.postMessage(id);
}

/** Call a function with the id of each conversation that another tab saves or deletes. */
export function watchOthers(changed) {
  others.onmessage = (event) => changed(event.data);
}

// Puts the page together: the composer, its keys, the dialogs, and what is asked of the server at the start.

import { json, nextKey, onKeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { Documents } from "./documents.js";
import { byId } from "./dom.js";
import { DOCUMENT, NAME, QUESTION, SECOND_QUESTION } from "./example.js";
import { follow } from "./live.js";
import { Panel } from "./panel.js";

const question = byId("question");
const panel = new Panel();
const documents = new Documents(question);
const chat = new Chat(panel, documents);

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
});

question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  chat.send();
});

byId("stop").addEventListener("click", () => chat.stop());

byId("new-chat").addEventListener("click", () => {
  chat.clear();
  byId("follow-up").hidden = true;
  question.focus();
});

chat.onBusy = (busy) => {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (hadFocus) byId(busy ? "stop" : "send").focus(); // a hidden button would drop the focus
};

byId("example").addEventListener("click", async () => {
  documents.add(DOCUMENT, NAME);
  question.value = QUESTION;
  question.focus();
  byId("follow-up").hidden = !(await chat.send());
});

byId("follow-up").addEventListener("click", () => {
  byId("follow-up").hidden = true;
  question.value = SECOND_QUESTION;
  question.focus();
  chat.send();
});

onKeyNeeded((wasWrong) => {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-title").textContent = wasWrong ? "The server does not accept this API key" : "This server asks for an API key";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = field.value.trim();
      field.value = "";
      resolve(dialog.returnValue === "use" && given ? given : null);
    }, { once: true });
  });
});

/** What does not change: the model's name, and the size of a block. */
async function introduce() {
  try {
    const { data } = await json("v1/models");
    byId("model").textContent = `${data[0].id}, up to ${data[0].max_model_len.toLocaleString("en")} tokens`;
    panel.blockSize = (await json("v1/cache")).block_size;
  } catch (error) {
    if (error.status !== 401) return; // the panel says when the server does not answer
    await nextKey();
    await introduce();
  }
}

follow();
introduce();

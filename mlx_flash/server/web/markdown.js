// Markdown of models as elements. HTML in it stays text, and a sanitizer checks what the parser made.

import { Marked } from "./vendor/marked/marked.esm.js";
import hljs from "./vendor/highlightjs/core.min.js";
import { make } from "./state.js";

const LANGUAGES = "bash cpp css diff go ini java json makefile python rust shell sql typescript xml yaml".split(" ");
const ALIASES = { typescript: ["javascript", "js", "jsx", "mjs"], cpp: ["c", "h"] };
await Promise.all(LANGUAGES.map(async (name) => {
  const grammar = await import(`./vendor/highlightjs/languages/${name}.min.js`);
  hljs.registerLanguage(name, grammar.default);
}));
for (const [languageName, names] of Object.entries(ALIASES)) hljs.registerAliases(names, { languageName });

const ALLOWED = {
  ALLOWED_TAGS: ("a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong sub sup table tbody td th thead"
    + " tr ul").split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const MATH = { throwOnError: true, trust: false, maxSize: [20, 200], maxExpand: 500 };

const LINES = String.raw`((?:(?!\n[ \t]*\n)[^])+?)`; // without an empty line
const DISPLAY = String.raw`(?:\$\$${LINES}\$\$|\\\[${LINES}\\\])`;
const BLOCK = new RegExp(String.raw`^ {0,3}${DISPLAY}[ \t]*(?:\n|$)`);
const INLINE = new RegExp(String.raw`^(?:${DISPLAY}|\$(?![\s$])((?:\\[^]|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(${LINES}\\\))`);

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (mark) => escapes[mark]);

function mathExtension(name, level, pattern, start) {
  return {
    name,
    level,
    start: (src) => src.search(start),
    tokenizer(src) {
      const [raw, ...parts] = pattern.exec(src) || [];
      if (raw === undefined) return undefined;
      return { type: name, raw, tex: parts.find((part) => part !== undefined), isDisplay: !!(parts[0] || parts[1]) };
    },
    renderer: ({ tex, isDisplay }) => `<span class="math${isDisplay ? " display" : ""}">${escape(tex)}</span>`,
  };
}

const marked = new Marked({
  breaks: true,
  extensions: [
    mathExtension("mathBlock", "block", BLOCK, /\n {0,3}(?:\$\$|\\\[)/),
    mathExtension("math", "inline", INLINE, /\$|\\[[(]/),
  ],
  tokenizer: {
    html() { return undefined; },
    tag(src) {
      const [raw] = /^<(?:br|\/?su[bp]) ?\/?>/i.exec(src) || [];
      return raw && { type: "html", raw, text: raw };
    },
  },
  renderer: {
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const [language] = (lang || "").split(/\s/, 1);
      const html = hljs.getLanguage(language) ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
      return `<pre title="${escape(language)}"><code>${html}\n</code></pre>`;
    },
    html: ({ text }) => text,
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // nothing is fetched
  },
});

function fragmentOf(token) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const box = make("div", "code"), bar = make("div"), copy = make("button", "quiet copy-code", "Copy");
    copy.type = "button";
    bar.append(pre.title, copy);
    pre.removeAttribute("title");
    pre.tabIndex = 0; // arrow keys scroll it
    pre.replaceWith(box);
    box.append(bar, pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "scroll");
    box.tabIndex = 0;
    table.replaceWith(box);
    box.append(table);
  }
  for (const math of fragment.querySelectorAll(".math")) {
    const tex = math.textContent;
    if (math.matches(".display")) math.tabIndex = 0;
    try {
      temml.render(tex, math, { ...MATH, displayMode: math.matches(".display") });
    } catch (error) {
      math.textContent = tex;
      math.title = error.message;
    }
  }
  return fragment;
}

/** Markdown in an element. Text that grows replaces only the blocks that it changes. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  /**
   * @param {string} text
   * @param {boolean} isGrowing hold back a last line of marks alone: the next character may change its meaning
   */
  show(text, isGrowing) {
    try {
      this.update(text, isGrowing);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested too deep for the stack
      this.shown = [];
      this.element.replaceChildren(make("pre", "", text));
    }
  }

  update(text, isGrowing) {
    const tokens = marked.lexer(isGrowing ? text.replace(/(^|\n)[ \t]*[-=*_~`#>+|:$\\[]+[ \t]*$/, "") : text);
    if (Object.keys(tokens.links).length) this.shown = []; // a link defined below changes blocks above
    let depth = 2, count = 0;
    for (const token of tokens) {
      if (token.type === "space" || token.type === "def") continue;
      if (token.type === "heading") token.depth = depth = Math.min(token.depth + 2, depth + 1, 6); // below the message's own
      if (this.shown[count] !== token.raw) {
        const block = make("div");
        block.append(fragmentOf(token));
        if (count < this.element.childElementCount) this.element.children[count].replaceWith(block);
        else this.element.append(block);
        this.shown[count] = token.raw;
      }
      count += 1;
    }
    this.shown.length = count;
    while (this.element.childElementCount > count) this.element.lastElementChild.remove();
  }
}

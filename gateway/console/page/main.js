// The page: who is asking, which view, and what stands around it.

import { html, render, useEffect, useState } from "./htm-preact.js";
import { call, setKey } from "./api.js";
import { Context } from "./context.js";
import { Contexts } from "./contexts.js";
import { Kept } from "./kept.js";
import { Operations } from "./operations.js";
import { Empty, useTitle } from "./pieces.js";
import { Playground } from "./playground.js";
import { forget } from "./turns.js";

const VIEWS = [["contexts", "Contexts"], ["kept", "Kept"], ["playground", "Playground"], ["operations", "Operations"]];

function route() {
  const [view, id] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return { view: view || "contexts", id: id ? decodeURIComponent(id) : null };
  } catch {
    return { view: "nowhere", id: null };
  }
}

function useRoute() {
  const [at, setAt] = useState(route);
  useEffect(() => {
    const changed = () => setAt(route());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return at;
}

function SignIn({ onOpen }) {
  const head = useTitle("Sign in");
  const [error, setError] = useState(null);
  const [isAsking, setIsAsking] = useState(false);
  const open = async (event) => {
    event.preventDefault();
    setKey(new FormData(event.currentTarget).get("key"));
    setIsAsking(true);
    try {
      await call("GET", "/v1/context?limit=1");
      onOpen();
    } catch (refusal) {
      // Any other refusal is the views' to tell: the key may be right.
      if (refusal.status && refusal.status !== 401) onOpen();
      else setError(refusal);
    } finally {
      setIsAsking(false);
    }
  };
  return html`<main class="signin" id="main">
    <form class="card" onSubmit=${open}>
      <h1 ref=${head} tabindex="-1">context-cache</h1>
      <label><span>API key</span>
        <input name="key" type="password" autocomplete="off" spellcheck="false" aria-describedby="key-said" aria-invalid=${Boolean(error)} />
      </label>
      <p id="key-said" class="note">The key stays in the memory of this tab until you reload it. A gateway without keys needs none.</p>
      ${error && html`<div class="problem" role="alert"><p>${error.message}</p></div>`}
      <button type="submit" class="primary" disabled=${isAsking}>Sign in</button>
    </form>
  </main>`;
}

function Shell({ onLeave }) {
  const { view, id } = useRoute();
  const [models, setModels] = useState([]);
  useEffect(() => {
    // Without them the views still work: what is missing is a choice.
    call("GET", "/v1/models").then((found) => setModels(found.data.map((model) => model.id)), () => {});
  }, []);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header><div class="row">
      <span class="brand">context-cache</span>
      <nav aria-label="Views">${VIEWS.map(([name, title]) =>
        html`<a href=${`#/${name}`} aria-current=${view === name ? "page" : null}>${title}</a>`)}</nav>
      <button type="button" class="quiet" onClick=${onLeave}>Sign out</button>
    </div></header>
    <main id="main" tabindex="-1"><${View} view=${view} id=${id} models=${models} /></main>`;
}

function View({ view, id, models }) {
  if (view === "contexts") return id ? html`<${Context} key=${id} id=${id} />` : html`<${Contexts} models=${models} />`;
  if (view === "kept") return html`<${Kept} />`;
  if (view === "playground") return html`<${Playground} id=${id} models=${models} />`;
  if (view === "operations") return html`<${Operations} />`;
  return html`<${Empty} title="No such view">Choose a view above.<//>`;
}

function App() {
  const [isOpen, setIsOpen] = useState(false);
  const leave = () => {
    setKey("");
    forget();
    setIsOpen(false);
  };
  return isOpen ? html`<${Shell} onLeave=${leave} />` : html`<${SignIn} onOpen=${() => setIsOpen(true)} />`;
}

const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);

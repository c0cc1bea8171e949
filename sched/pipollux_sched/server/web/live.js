// Live state of the scheduler, polled periodically and whenever an event arrives.

import { Away, Refusal, ask, listen } from "./api.js";

const PAUSE_MS = 2000;
const SHARE = 20; // pause between two requests, in multiples of the duration of a request
const SOON_MS = 50;
const EVENTS = 100;

/** Dispatches "update" for new data, "told" with an event, "refused" with a sentence. */
export class Live extends EventTarget {
  data = null;
  events = [];
  /** Time of the first unanswered request, in seconds; null: the scheduler answers. */
  awaySince = null;
  /** The sentence of its last refusal; null: none. */
  trouble = null;
  /** Seconds by which its clock is ahead of the browser's. */
  ahead = 0;
  /** The query for jobs, as sent to the scheduler. */
  query = "limit=0";
  /** The known numbers of jobs, which determine their colours. */
  numbers = new Map();

  #ending = new AbortController();
  #timer = 0;
  #asking = false;
  #again = false;
  #last = 0;
  #took = 0;

  /** Now, by the scheduler's clock. */
  get now() {
    return Date.now() / 1000 + this.ahead;
  }

  /** Whether the token may change the cluster itself. */
  get isAdmin() {
    return this.data?.caller?.role === "admin";
  }

  /** Whether the token may suspend, resume and cancel the jobs of a user. */
  manages(user) {
    const { role, name } = this.data?.caller ?? {};
    return this.isAdmin || (role === "user" && name === user);
  }

  /** Remember numbers of jobs: [[name, number], …]. */
  note(numbers) {
    for (const [name, number] of numbers) this.numbers.set(name, number);
  }

  async start() {
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh(), {
      signal: this.#ending.signal,
    });
    await this.refresh();
    this.#follow();
  }

  stop() {
    this.#ending.abort();
    clearTimeout(this.#timer);
  }

  /** Request everything again now, or after the pending request. */
  async refresh() {
    if (this.#asking) {
      this.#again = true;
      return;
    }
    this.#asking = true;
    clearTimeout(this.#timer);
    const begun = performance.now();
    const first = this.data === null;
    const { query } = this;
    try {
      const found = await ask(`/overview?${query}&events=${first ? EVENTS : 0}`);
      this.data = { ...found, query };
      this.ahead = this.data.time - Date.now() / 1000;
      if (first) {
        this.events = this.data.events;
        this.#last = this.data.last_event;
      }
      this.awaySince = null;
    } catch (error) {
      this.#failed(error);
    }
    this.#asking = false;
    if (this.#ending.signal.aborted) return;
    this.dispatchEvent(new Event("update"));
    this.#took = performance.now() - begun;
    this.#soon(this.#again ? 0 : Math.max(PAUSE_MS, SHARE * this.#took));
    this.#again = false;
  }

  #soon(wait) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => document.hidden || this.refresh(), wait);
  }

  async #follow() {
    const { signal } = this.#ending;
    while (!signal.aborted) {
      try {
        for await (const event of listen(this.#last, signal, () => this.refresh())) this.#told(event);
        throw new Away("the stream has ended");
      } catch (error) {
        // With too many listeners, only polling is left.
        if (!(error instanceof Refusal) || error.status === 401) this.#failed(error);
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }

  #told(event) {
    this.#last = event.id;
    this.events = [...this.events, event].slice(-EVENTS);
    this.dispatchEvent(new CustomEvent("told", { detail: event }));
    this.#soon(Math.max(SOON_MS, 2 * this.#took));
  }

  #failed(error) {
    if (this.#ending.signal.aborted) return;
    if (error instanceof Refusal && error.status === 401) {
      this.stop();
      this.dispatchEvent(new CustomEvent("refused", { detail: error.message }));
    } else if (error instanceof Away || error instanceof Refusal) {
      this.awaySince ??= this.now;
      this.trouble = error instanceof Refusal ? error.message : null;
      this.dispatchEvent(new Event("update"));
    } else {
      throw error;
    }
  }
}

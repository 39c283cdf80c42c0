// Undo and redo. Typing within a second is one step; every command is a step of its own.

const PAUSE = 1000; // milliseconds

export class History {
  constructor(text) {
    this.past = [];
    this.now = text;
    this.future = [];
    this.typed = 0;
  }

  /** Note a new text; `typing` joins it to the step before, if that was typed just now. */
  add(text, typing = false) {
    if (text === this.now) return;
    const time = Date.now();
    if (!typing || time - this.typed > PAUSE) this.past.push(this.now);
    this.typed = typing ? time : 0;
    this.now = text;
    this.future = [];
  }

  undo() {
    return this.#move(this.past, this.future);
  }

  redo() {
    return this.#move(this.future, this.past);
  }

  #move(from, to) {
    if (!from.length) return null;
    to.push(this.now);
    this.typed = 0;
    return (this.now = from.pop());
  }
}

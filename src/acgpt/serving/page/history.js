// Undo and redo. Typing within a second is one step; every command is a step of its own.

const PAUSE = 1000; // milliseconds

export class History {
  #typed = 0; // when the last step was typed

  constructor(text) {
    this.steps = [text];
    this.at = 0;
  }

  /** Note a new text; `typing` joins it to the step before, if that was typed just now. */
  add(text, typing = false) {
    if (text === this.steps[this.at]) return;
    const time = Date.now();
    if (!typing || time - this.#typed > PAUSE) this.at++;
    this.#typed = typing ? time : 0;
    this.steps.splice(this.at, Infinity, text);
  }

  can(step) {
    return this.at + step in this.steps;
  }

  /** Return the text before (-1) or after (1) this one, which it becomes; null if there is none. */
  move(step) {
    if (!this.can(step)) return null;
    this.#typed = 0;
    return this.steps[(this.at += step)];
  }
}

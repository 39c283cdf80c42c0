// Texts to start from: what follows decides which words belong there. Each is shown as the open view needs it.

const EXAMPLES = {
  Story: ["Every Saturday Mia went to the ", ["library", "beach", "gym"], " to borrow new books."],
  Email: [
    "Hi Anna,\n\nI am at the ",
    ["airport", "end", "office"],
    " and my flight leaves in an hour.\n\nBest wishes,\nTom",
  ],
  Python: ["def area(", ["radius", "shape", "side"], "):\n    return 3.14159 * radius ** 2\n"],
  JSON: ['{"capital": "', ["Rome", "Paris", "USA"], '", "country": "Italy", "river": "Tiber"}\n'],
  Poem: [
    "Twinkle, twinkle, little ",
    ["star", "angel", "one"],
    ",\nhow I wonder what you are,\nup above the world so high,\nlike a diamond in the sky.",
  ],
};
const SLOTS = {
  fill: () => "{{_}}",
  surprise: ([words]) => words,
  rank: (words) => `{{${words.join("|")}}}`,
  layout: ([words]) => `{{${words}}}`,
};

export const NAMES = Object.keys(EXAMPLES);

/** The text of an example, for a view. */
export function example(name, view) {
  const [before, words, after] = EXAMPLES[name];
  return before + SLOTS[view](words) + after;
}

/** The text for another view, if it is that of an example; else the text as it is. */
export function inView(text, view) {
  const name = NAMES.find((name) => Object.keys(SLOTS).some((other) => example(name, other) === text));
  return name ? example(name, view) : text;
}

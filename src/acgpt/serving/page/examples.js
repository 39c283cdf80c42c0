// Texts to start from: what follows each gap decides what belongs there.

export const EXAMPLES = {
  Story: "Every Saturday Mia went to the {{_}}. She gave back her books, borrowed new ones, and sat down to read.",
  Email: "Hi Anna,\n\nthank you for the {{_}}. I read it in one night and could not put it down.\n\nBest wishes,\nTom",
  Python: "with open(path) as {{_}}:\n    text = file.read()\n    print(len(text))\n",
  JSON: '{"city": "{{_}}", "country": "France", "river": "Seine"}\n',
  Poem: "Twinkle, twinkle, little {{_}},\nhow I wonder what you are,\nup above the world so high,\nlike a diamond in the sky.",
};

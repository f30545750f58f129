// What pages of models that were recorded have beside those of models that the page runs: recorded.js fills it.

export const others = {};

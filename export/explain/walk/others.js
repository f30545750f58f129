// Additions for pages with recorded models; recorded.js fills it in.

export const others = {};

// The glossary: terms with two sentences, a formula, a page of the guide. In a text a term stands in [[brackets]].

import { escaped } from '../../../mlx_transformer/page/kit.js';

export const GLOSSARY = {
  'alignment': ['Which source word each written word was made from. Cross-attention shows one, though nobody taught it.', '', 'decoding'],
  'attention': ['Each word looks at others and takes a weighted sum of what they hand over. The weights are computed anew for each sentence.', 'softmax(Q Kᵀ / √d_k) V', 'attention'],
  'autoregressive': ['Writing word by word, each one read again before the next. It ends with the end token.', '', 'decoding'],
  'batch norm': ['A norm over the examples of a batch instead of over one vector. Sentences of different lengths make it unsteady.', '', 'residual'],
  'beam': ['A search that keeps the K best beginnings. At the end it compares whole outputs.', '', 'decoding'],
  'bias': ['A vector that is added after a product with a matrix. It is learned.', 'x W + b', 'feedforward'],
  'context': ['What a word has taken from the others. Its vector holds it after the first attention.', 'Σ weight · v', 'attention'],
  'cross-attention': ['Attention of the decoder over the encoder\'s output. Queries come from one side, keys and values from the other.', '', 'stacks'],
  'decoder': ['The stack that writes. It sees what was written and, in a translator, the source.', '', 'stacks'],
  'd_model': ['How many numbers a word\'s vector has. It stays the same through all layers.', '', 'embedding'],
  'dropout': ['In training a part of the numbers is set to 0 by chance. When the model is used, nothing is dropped.', '', 'optimizer'],
  'embedding': ['The table with a vector for every token, or one of its rows. It is learned.', 'E[id] · √d', 'embedding'],
  'encoder': ['The stack that reads. Every word may look at every other.', '', 'stacks'],
  'epsilon': ['A tiny number under the root of a norm. It keeps a vector of equal numbers from a division by 0.', '√(σ² + ε)', 'residual'],
  'feed-forward': ['Two matrices with a bend between them, for each word by itself. Most of a layer\'s numbers are here.', 'max(0, x W₁ + b₁) W₂ + b₂', 'feedforward'],
  'gradient': ['How the loss changes with each number of the model. Training goes a little way against it.', '', 'optimizer'],
  'greedy search': ['Takes the likeliest token at every step. It never comes back on a choice.', 'argmax p', 'decoding'],
  'head': ['One of several looks that attention takes at once. It has its own queries, keys and values.', '', 'heads'],
  'id': ['The number of a token. It is the number of its row in the table.', '', 'tokens'],
  'inner unit': ['One of the numbers between the two matrices of the feed-forward net. Each reacts to one direction of the vector.', '', 'feedforward'],
  'key': ['What a word can be found by: it is compared with queries. Made of its vector by W_K.', 'k = x W_K', 'attention'],
  'label smoothing': ['Training asks for a little less than 1 for the right word. The model stays a little unsure.', '', 'loss'],
  'layer': ['Attention and feed-forward net, each with residual and norm. The stack repeats it with other numbers.', '', 'stacks'],
  'layer norm': ['Makes the mean of a vector 0 and its deviation 1, then scales and shifts each column. Each word by itself.', '(x − μ) / √(σ² + ε) · γ + β', 'residual'],
  'length penalty': ['What log p is divided by, so that long outputs aren\'t always worse. With α = 0 it is 1.', '((5 + n) / 6)^α', 'decoding'],
  'logit': ['The score of a token before the softmax. Any number, larger is likelier.', 'h · E[w]', 'classifier'],
  'log p': ['The logarithm of a probability. Those of the words of an output are added up; 0 is certain.', 'Σ log p', 'decoding'],
  'mask': ['−∞ is added to the score of what may not be seen. Its weight becomes 0.', 'softmax(s + mask)', 'masks'],
  'memory': ['The vectors that the encoder ends with, one for each source token. The decoder looks at them in every layer.', '', 'stacks'],
  'one-hot': ['A vector of zeros with a single 1. It is the same as the id.', '', 'embedding'],
  'positional encoding': ['The vector of a place: sines and cosines of many lengths. It is added to the word\'s.', 'sin(pos / 10000^(2i/d))', 'positions'],
  'query': ['What a word looks for: it is compared with keys. Made of its vector by W_Q.', 'q = x W_Q', 'attention'],
  'relu': ['What is below 0 becomes 0. The bend without which two matrices were one.', 'max(0, x)', 'feedforward'],
  'residual': ['What went in is added to what came out. So every layer only changes a little.', 'x + Sublayer(x)', 'residual'],
  'self-attention': ['Attention in which queries, keys and values come from the same words. The special case of attention.', '', 'attention'],
  'softmax': ['Turns any numbers into shares that add up to 1. The larger a number, the larger by far its share.', 'e^s / Σ e^s', 'scores'],
  'temperature': ['The number that logits are divided by. Below 1 choices get surer, above 1 more even.', 'softmax(logits / T)', 'decoding'],
  'token': ['A piece of text with a number of its own. Everything that a model reads and writes is tokens.', '', 'tokens'],
  'value': ['What a word hands over when it is looked at. Made of its vector by W_V.', 'v = x W_V', 'attention'],
  'vector': ['A list of numbers: a place in a space of many dimensions. Near ones mean alike.', '', 'embedding'],
  'vocabulary': ['All tokens that a model knows. As many as there are rows in the table.', '', 'tokens'],
  '√d_k': ['The root of a head\'s width, by which scores are divided. It keeps the softmax from being all or nothing.', 'q · k / √d_k', 'scores'],
};

/** A text with its terms as buttons: [[term]] or [[term|as shown]]. */
export const words = (text) => text.replace(/\[\[([^\]|]+)(?:\|([^\]]+))?\]\]/g, (_, term, shown) => (
  `<button type="button" class="gl" data-gl="${escaped(term.toLowerCase())}" aria-haspopup="dialog">${escaped(shown ?? term)}</button>`));

export const entry = (term) => {
  const [said, formula, page] = GLOSSARY[term];
  return `<b>${escaped(term)}</b> ${escaped(said)}${formula ? ` <code>${escaped(formula)}</code>` : ''} <small>guide: ${escaped(page)}</small>`;
};

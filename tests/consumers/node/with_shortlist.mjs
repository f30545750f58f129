// The candidates that the page's Shortlist names.
//
//     node with_shortlist.mjs PAGE TASK.json ANSWER.json
//
// Task: {file, shared, size (of the vocabulary), rows (of source ids)}. Answer: candidates of each row.

import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [page, task, answer] = process.argv.slice(2);
const { Shortlist } = await import(pathToFileURL(join(page, 'shortlist.js')).href);
const { file, shared, size, rows } = JSON.parse(readFileSync(task));
const shortlist = new Shortlist(new Uint8Array(readFileSync(file)), shared);
writeFileSync(answer, JSON.stringify(rows.map((row) => shortlist.candidates(row, size))));

// The script of a page with at least one recorded model.

import { Recorded } from './recorded.js';
import { modelOf } from './walk.js';

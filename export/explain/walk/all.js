// The page of models of which one at least was recorded.

import { Recorded } from './recorded.js';
import { modelOf } from './walk.js';

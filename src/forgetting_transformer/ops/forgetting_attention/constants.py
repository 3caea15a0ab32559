"""Numbers that all backends share."""

import math

#: Queries of a block, keys of a stretch, which are summed, and left out by pruning, together.
STRETCH = 128
#: Kernels compute in base 2, which saves a product per exponential.
LOG2_E = math.log2(math.e)
#: log f is clamped here: finite numbers keep -inf - (-inf) = NaN out of running sums. exp(-256) is 0 in float32 even
#: against a score difference of 150, and a larger number would cost accuracy after a hard reset (2e-5 with this one).
MIN_LOG_FGATE = -256.0

// Is the run through the server the run in this process? Every token must be equal, and every logit
// within what FP32 rounding explains.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/demo/generate.h"

namespace ssmd::demo {

struct Comparison {
  bool tokens_equal = true;
  double logit_difference = 0.0;  // largest, over all positions; infinite for a NaN
  uint64_t positions = 0;         // compared
  std::string first_difference;   // of the tokens; for people; empty when there is none
};

// Requires: streams[i] and others[i] ran the same prompt, logits kept.
Comparison Compare(absl::Span<const Stream> streams, absl::Span<const Stream> others);

// How far apart two correct FP32 evaluations of the model may put a logit. `stream` is a finished
// LocalSsm<float> run with its logits: the numbers are measured on its text.
//
// Where the two differ. Both run the same code but for what lies between an SSM layer's projections
// and its gated norm, and there they round differently, by at most u = 2^-24 each time:
//   convolution  the bias and four products are summed (at most five roundings of the sum of their
//                magnitudes), SiLU takes another five (exp, sum, quotient, product)
//   gates        softplus, exp and their product: five; L2 norm: of n = d_k positive terms, about
//                sqrt(n / 3) roundings of the sum, half of that of its root; the product: one
//   recurrence   per token each element of a state sees at most three (decay, product, sum), each
//                dot product over d_k one per partial sum
//   D x          two
// In post-conv form the first two are one code on both sides, which only makes this wider than it
// need be. Rounding is contractive here: the decays and (I - beta k k^T) have norm at most one, so
// errors fade as the state does. What a rounding means at the logits is a property of the model,
// and is measured rather than guessed: the text is run once more with errors of at most
// eta = 2^-14, that is 1,024 u, drawn once at each of those places (the noise of LocalSsm and
// ShortConv), in all layers at all tokens, and the largest change of a logit is D. Errors this
// small act linearly, so one rounding per place makes
//   (u / eta) D.
// From there to the tolerance:
//   sqrt(5)  five independent roundings per place where one was drawn
//   2        both sides round
//   2        the dense layers see inputs that differ and round differently too: 256 to 384 terms a
//            sum against d_k = 128 and the text's length: about as much again
//   4        the largest of several texts' roundings against the largest of one text's: largest
//            values of about 10^6 samples differ from those of 10^5 by a factor of 1.1 in a normal
//            distribution; 4 leaves room for the steps' different grouping on the server
// Together 36 (u / eta) D.
struct Tolerance {
  double logit = 0.0;      // the result
  double amplified = 0.0;  // (u / eta) D
};
absl::StatusOr<Tolerance> MeasureTolerance(const HybridModel& model, const Stream& stream,
                                           const std::function<void(uint64_t bytes)>& progress);

}  // namespace ssmd::demo

// ssmctl top: what a server does now, from two readings of its status.
#pragma once

#include <cstddef>
#include <string>

#include "ssmd/v1/state_service.pb.h"

namespace ssmd::ctl {

// A picture of at most `height` lines of at most `width` columns, each ended by a newline. Rates
// are over the server's own uptime between the readings; "-" when `before` is of another life of
// the server, not older, or lacks the model. Pure.
std::string TopText(const v1::GetStatusResponse& before, const v1::GetStatusResponse& now,
                    const std::string& server, size_t width, size_t height);

}  // namespace ssmd::ctl

// Calls of methods that are known by name only: bytes in, bytes out.
#pragma once

#include <grpcpp/generic/generic_stub.h>

#include <string>
#include <vector>

#include "tests/e2e/harness.h"

namespace ssmd::e2e {

struct AnyReply {
  grpc::Status status;
  std::vector<std::string> messages;
};

// Sends the messages, closes its side, and reads to the end.
inline AnyReply CallAny(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                        const std::vector<std::string>& messages,
                        const std::string& authorization) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + Client::kDeadline);
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(&context, path, &queue);
  const auto done = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  bool open = done();
  for (const std::string& message : messages) {
    if (!open) break;
    const grpc::Slice slice(message);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    open = done();
  }
  if (open) {
    call->WritesDone(nullptr);
    done();
  }
  AnyReply reply;
  while (true) {
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    if (!done()) break;
    std::vector<grpc::Slice> slices;
    std::string& bytes = reply.messages.emplace_back();
    if (!buffer.Dump(&slices).ok()) continue;
    for (const grpc::Slice& slice : slices)
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  call->Finish(&reply.status, nullptr);
  done();
  return reply;
}

inline std::string Bearer(const std::string& token) { return absl::StrCat("Bearer ", token); }

}  // namespace ssmd::e2e

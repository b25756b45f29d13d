// One Steps stream, spoken synchronously: send calls, wait for the reply of a tag.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/harness.h"

namespace ssmd::e2e {

class StepsClient {
 public:
  explicit StepsClient(Client& client, bool with_context = true,
                       std::chrono::seconds deadline = Client::kDeadline)
      : client_(client), send_context_(with_context) {
    context.set_deadline(std::chrono::system_clock::now() + deadline);
    client.AddToken(context);
    stream = client.stub->Steps(&context);
  }
  ~StepsClient() {
    if (!finished_) {
      context.TryCancel();
      Finish();
    }
  }
  StepsClient(const StepsClient&) = delete;
  StepsClient& operator=(const StepsClient&) = delete;

  // Sends and returns the tag; the first message carries the context.
  uint64_t Send(v1::StepsRequest request) {
    if (send_context_) client_.FillContext(*request.mutable_context());
    send_context_ = false;
    request.set_tag(++last_tag_);
    stream->Write(request);
    return last_tag_;
  }
  // The messages' own contexts are dropped: the stream has one.
  uint64_t Send(v1::BeginStepRequest call) {
    v1::StepsRequest request;
    call.clear_context();
    *request.mutable_begin() = std::move(call);
    return Send(std::move(request));
  }
  uint64_t Send(v1::VerifyRequest call) {
    v1::StepsRequest request;
    call.clear_context();
    *request.mutable_verify() = std::move(call);
    return Send(std::move(request));
  }
  uint64_t Send(v1::CommitRequest call) {
    v1::StepsRequest request;
    call.clear_context();
    *request.mutable_commit() = std::move(call);
    return Send(std::move(request));
  }
  uint64_t SendAbort(uint64_t step) {
    v1::StepsRequest request;
    request.mutable_abort()->set_model_id(client_.model_id);
    request.mutable_abort()->set_step_id(step);
    return Send(std::move(request));
  }

  // The next reply, whatever it answers; tag 0 when the stream has ended.
  v1::StepsResponse Next() {
    v1::StepsResponse response;
    if (!stream->Read(&response)) response.set_tag(0);
    return response;
  }

  // The reply of `tag`, keeping others for later.
  Reply<v1::StepsResponse> Await(uint64_t tag) {
    Reply<v1::StepsResponse> reply;
    while (!waiting_.contains(tag)) {
      v1::StepsResponse response = Next();
      if (response.tag() == 0) {
        ADD_FAILURE() << "the stream ended before the reply of tag " << tag << ": "
                      << Finish().error_message();
        reply.status = grpc::Status(grpc::UNKNOWN, "no reply");
        return reply;
      }
      waiting_[response.tag()] = std::move(response);
    }
    reply.body = std::move(waiting_[tag]);
    waiting_.erase(tag);
    const google::rpc::Status& status = reply.body.status();
    reply.status = grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message(),
                                status.SerializeAsString());
    DecodeDetails(reply.status, reply.info, reply.bad_request, reply.retry);
    return reply;
  }
  bool Answered(uint64_t tag) const { return waiting_.contains(tag); }

  // Verbs that must succeed.
  uint64_t Begin(v1::BeginStepRequest call) {
    const auto reply = Await(Send(std::move(call)));
    EXPECT_TRUE(reply.ok()) << reply.status.error_message();
    return reply.body.begin().step_id();
  }
  uint64_t Begin(const std::vector<Client::Row>& rows) { return Begin(client_.StepOf(rows)); }
  std::vector<std::string> VerifyAll(uint64_t step, uint32_t token_count) {
    std::vector<std::string> outputs;
    for (const uint32_t layer_id : kSmallLayers) {
      const auto reply = Await(Send(client_.VerifyOf(step, layer_id, token_count)));
      EXPECT_TRUE(reply.ok()) << reply.status.error_message();
      outputs.push_back(reply.body.verify().output().data());
    }
    return outputs;
  }
  v1::CommitResponse Commit(uint64_t step, const std::vector<uint32_t>& accepted) {
    const auto reply = Await(Send(client_.CommitOf(step, accepted)));
    EXPECT_TRUE(reply.ok()) << reply.status.error_message();
    return reply.body.commit();
  }

  void HalfClose() { stream->WritesDone(); }
  grpc::Status Finish() {
    if (finished_) return status_;
    finished_ = true;
    v1::StepsResponse rest;
    while (stream->Read(&rest)) waiting_[rest.tag()] = rest;
    return status_ = stream->Finish();
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepsRequest, v1::StepsResponse>> stream;

 private:
  Client& client_;
  bool send_context_;
  uint64_t last_tag_ = 0;
  std::map<uint64_t, v1::StepsResponse> waiting_;
  bool finished_ = false;
  grpc::Status status_;
};

}  // namespace ssmd::e2e

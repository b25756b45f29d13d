#include "service/other_services.h"

#include "absl/strings/match.h"

namespace ssmd {
namespace {

using grpc::experimental::InterceptionHookPoints;

class Guard final : public grpc::experimental::Interceptor {
 public:
  Guard(const Authorizer& authorizer, Door door, grpc::experimental::ServerRpcInfo* info)
      : authorizer_(authorizer), door_(door), info_(*info) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA) &&
        !authorizer_.Authorize(door_, info_.method(), *info_.server_context()).ok())
      info_.server_context()->TryCancel();
    methods->Proceed();
  }

 private:
  const Authorizer& authorizer_;
  const Door door_;
  grpc::experimental::ServerRpcInfo& info_;
};

class GuardFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  GuardFactory(const Authorizer* authorizer, Door door) : authorizer_(*authorizer), door_(door) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (absl::StartsWith(info->method(), "/ssmd.")) return nullptr;
    return new Guard(authorizer_, door_, info);
  }

 private:
  const Authorizer& authorizer_;
  const Door door_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardOtherServices(
    const Authorizer* authorizer, Door door) {
  return std::make_unique<GuardFactory>(authorizer, door);
}

}  // namespace ssmd

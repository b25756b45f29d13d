// The flags of our programs that become a client::Security.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "client/security.h"

namespace ssmd::client {

// `environment`: what the variables that stand for the flags begin with; "": none do.
inline void AddSecurityFlags(CLI::App& app, Security& security, const std::string& environment) {
  const auto add = [&](const char* flag, const char* variable, std::string& target,
                       const char* type, const char* help) {
    CLI::Option* option = app.add_option(flag, target, help)->type_name(type);
    if (!environment.empty()) option->envname(environment + variable);
  };
  add("--tls-ca", "TLS_CA", security.ca_file, "FILE",
      "use TLS, and believe servers with a certificate of this authority (PEM)");
  add("--tls-cert", "TLS_CERT", security.cert_file, "FILE",
      "a certificate to show (PEM); with --tls-key");
  add("--tls-key", "TLS_KEY", security.key_file, "FILE", "its key (PEM)");
  add("--tls-server-name", "TLS_SERVER_NAME", security.server_name, "NAME",
      "the name in the server's certificate, when it is not that of the address");
  add("--token-file", "TOKEN_FILE", security.token_file, "FILE",
      "a file whose first word is the token to send");
}

}  // namespace ssmd::client

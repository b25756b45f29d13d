// Certificates for tests: an authority, and what it signs. Elliptic-curve keys; valid for a day
// around now; PEM.
#pragma once

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

#include "kernels/check.h"

namespace ssmd::e2e {

struct Identity {
  std::string certificate, key;
};

class Authority {
 public:
  explicit Authority(const std::string& name)
      : name_(name), key_(NewKey()), certificate_(Make(name, key_.get(), "", true)) {}

  std::string certificate() const { return Pem(certificate_.get()); }

  // `subject_names`: as openssl's subjectAltName has them: "DNS:ssmd.test,IP:127.0.0.1"; "": none.
  Identity Issue(const std::string& common_name, const std::string& subject_names = "") const {
    const KeyRef key = NewKey();
    const CertificateRef certificate = Make(common_name, key.get(), subject_names, false);
    return {Pem(certificate.get()), Pem(key.get())};
  }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(X509_EXTENSION* extension) const { X509_EXTENSION_free(extension); }
    void operator()(BIO* bio) const { BIO_free(bio); }
  };
  using KeyRef = std::unique_ptr<EVP_PKEY, Free>;
  using CertificateRef = std::unique_ptr<X509, Free>;

  static KeyRef NewKey() {
    KeyRef key(EVP_EC_gen("P-256"));
    SSMD_CHECK(key != nullptr, "no key");
    return key;
  }

  CertificateRef Make(const std::string& common_name, EVP_PKEY* key,
                      const std::string& subject_names, bool is_authority) const {
    constexpr long kDay = 86'400;
    CertificateRef certificate(X509_new());
    X509* const x = certificate.get();
    X509_set_version(x, X509_VERSION_3);
    static int serial = 0;
    ASN1_INTEGER_set(X509_get_serialNumber(x), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(x), -kDay);
    X509_gmtime_adj(X509_getm_notAfter(x), kDay);
    SetName(X509_get_subject_name(x), common_name);
    SetName(X509_get_issuer_name(x), name_);
    X509_set_pubkey(x, key);
    Extend(x, NID_basic_constraints, is_authority ? "critical,CA:TRUE" : "CA:FALSE");
    if (!subject_names.empty()) Extend(x, NID_subject_alt_name, subject_names);
    SSMD_CHECK(X509_sign(x, key_.get(), EVP_sha256()) > 0, "cannot sign");
    return certificate;
  }
  static void SetName(X509_NAME* name, const std::string& common_name) {
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1,
                               0);
  }
  static void Extend(X509* certificate, int kind, const std::string& value) {
    const std::unique_ptr<X509_EXTENSION, Free> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
    SSMD_CHECK(extension != nullptr, "not an extension: %s", value.c_str());
    X509_add_ext(certificate, extension.get(), -1);
  }
  template <typename T>
  static std::string Pem(T* object) {
    const std::unique_ptr<BIO, Free> bio(BIO_new(BIO_s_mem()));
    if constexpr (std::is_same_v<T, X509>) {
      PEM_write_bio_X509(bio.get(), object);
    } else {
      PEM_write_bio_PrivateKey(bio.get(), object, nullptr, nullptr, 0, nullptr, nullptr);
    }
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio.get(), &data);
    return std::string(data, static_cast<size_t>(size));
  }

  const std::string name_;
  const KeyRef key_;
  const CertificateRef certificate_;
};

}  // namespace ssmd::e2e

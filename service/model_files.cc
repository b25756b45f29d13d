#include "service/model_files.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "service/config_file.h"

namespace ssmd {
namespace {

// Keeps the first mistake; later ones often follow from it.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  // Protobuf renamed this method; whichever it calls is here, so neither says `override`.
  // NOLINTNEXTLINE(modernize-use-override)
  void AddError(int line, int column, const std::string& message) { Keep(line, column, message); }
  void RecordError(int line, int column, absl::string_view message) { Keep(line, column, message); }

  std::string text;  // "LINE:COLUMN: message", from 1

 private:
  void Keep(int line, int column, absl::string_view message) {
    if (text.empty()) text = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
};

}  // namespace

absl::StatusOr<v1::RegisterModelRequest> ReadModelFile(const std::string& path) {
  SSMD_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path));
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  v1::RegisterModelRequest request;
  if (parser.ParseFromString(text, &request)) return request;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ":", error.text.empty() ? "1:1: not a text proto" : error.text));
}

}  // namespace ssmd

#include "coordinator/server/journal.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include "proto/base/rng.h"
#include "proto/limits/plausible.h"

namespace remesh::server {
namespace {

constexpr int kApplicationId = 0x524d4a4c;  // "RMJL", in the file's header
constexpr int kVersion = 1;
constexpr int kBusyMs = 1000;

constexpr const char* kSchema = R"sql(
  CREATE TABLE state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    durable BLOB NOT NULL,
    checksum INTEGER NOT NULL);
)sql";

struct CloseDb {
  void operator()(sqlite3* db) const { sqlite3_close_v2(db); }
};
struct Finalize {
  void operator()(sqlite3_stmt* s) const { sqlite3_finalize(s); }
};
using Db = std::unique_ptr<sqlite3, CloseDb>;
using Statement = std::unique_ptr<sqlite3_stmt, Finalize>;

int64_t checksum_of(const std::string& bytes) {
  return static_cast<int64_t>(hash64(bytes));
}

std::string column_bytes(sqlite3_stmt* s, int column) {
  const auto* data = static_cast<const char*>(sqlite3_column_blob(s, column));
  const int size = sqlite3_column_bytes(s, column);
  return data == nullptr ? std::string() : std::string(data, size);
}

class SqliteJournal : public Journal {
 public:
  explicit SqliteJournal(std::string path) : path_(std::move(path)) {}

  // Opens an existing journal.
  Status start() {
    RETURN_IF_ERROR(connect());
    RETURN_IF_ERROR(check_sound());
    RETURN_IF_ERROR(set_durability());
    return load();
  }

  // Creates an empty journal.
  Status make() {
    RETURN_IF_ERROR(connect());
    RETURN_IF_ERROR(set_durability());
    return exec(fmt::format("BEGIN IMMEDIATE; PRAGMA application_id={}; "
                            "PRAGMA user_version={}; {} COMMIT",
                            kApplicationId, kVersion, kSchema)
                    .c_str());
  }

  const std::optional<pb::Durable>& restored() const override {
    return restored_;
  }

  Status persist(const pb::Durable& durable) override {
    RETURN_IF_ERROR(exec("BEGIN IMMEDIATE"));
    Status status = check_mine(durable.epoch());
    tried_ = checksum_of(durable.SerializeAsString());
    if (status.ok()) status = write(durable);
    if (status.ok()) status = exec("COMMIT");
    if (!status.ok() && sqlite3_get_autocommit(db_.get()) == 0) {
      // Best effort: the first failure is the one to report.
      (void)exec("ROLLBACK").ok();
    }
    if (status.ok()) known_ = tried_;
    return status;
  }

 private:
  Status connect() {
    sqlite3* raw = nullptr;
    const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    const int code = sqlite3_open_v2(path_.c_str(), &raw, flags, nullptr);
    db_.reset(raw);
    if (code != SQLITE_OK) return failure("open", code);
    sqlite3_extended_result_codes(db_.get(), 1);
    sqlite3_busy_timeout(db_.get(), kBusyMs);
    // Do not trust table definitions in a damaged file.
    sqlite3_db_config(db_.get(), SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
    sqlite3_db_config(db_.get(), SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
    return exec("PRAGMA cell_size_check=ON");
  }

  Status set_durability() {
    RETURN_IF_ERROR(exec("PRAGMA journal_mode=TRUNCATE"));
    return exec("PRAGMA synchronous=FULL");
  }

  Status damaged(const std::string& what) const {
    return corrupt(fmt::format(
        "{}: the journal is damaged: {}. It was not modified. To continue from "
        "the newest checkpoint, stop all workers of this run, move the file "
        "away (mv {} {}.damaged) and restart with --resume",
        path_, what, path_, path_));
  }

  Status failure(const std::string& what, int code) const {
    const std::string text =
        db_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(db_.get());
    switch (code & 0xff) {
      case SQLITE_CORRUPT:
      case SQLITE_NOTADB:
      case SQLITE_FORMAT:
        return damaged(text);
      case SQLITE_FULL:
        return exhausted(path_ + ": " + what + ": the disk is full");
      case SQLITE_BUSY:
      case SQLITE_LOCKED:
        return unavailable(path_ + ": " + what +
                           ": another program has the journal open");
      default:
        return io_error(path_ + ": " + what + ": " + text);
    }
  }

  Status exec(const char* sql) const {
    const int code = sqlite3_exec(db_.get(), sql, nullptr, nullptr, nullptr);
    return code == SQLITE_OK ? ok_status() : failure(sql, code);
  }

  Result<Statement> prepare(const char* sql) const {
    sqlite3_stmt* s = nullptr;
    const int code = sqlite3_prepare_v2(db_.get(), sql, -1, &s, nullptr);
    if (code == SQLITE_OK) return Statement(s);
    // An intact journal has every table and column.
    if ((code & 0xff) == SQLITE_ERROR)
      return damaged(sqlite3_errmsg(db_.get()));
    return failure(sql, code);
  }

  Result<int64_t> read_int(const char* sql) const {
    ASSIGN_OR_RETURN(Statement s, prepare(sql));
    const int code = sqlite3_step(s.get());
    if (code == SQLITE_ROW) return int64_t{sqlite3_column_int64(s.get(), 0)};
    if (code == SQLITE_DONE) return damaged("a row is missing");
    return failure(sql, code);
  }

  Status check_sound() {
    ASSIGN_OR_RETURN(const int64_t id, read_int("PRAGMA application_id"));
    ASSIGN_OR_RETURN(const int64_t version, read_int("PRAGMA user_version"));
    if (id != kApplicationId) return damaged("it is not a journal of remesh");
    if (version != kVersion) {
      return invalid_argument(
          fmt::format("{}: journal version {}, but this program reads {}",
                      path_, version, kVersion));
    }
    ASSIGN_OR_RETURN(Statement s, prepare("PRAGMA integrity_check(1)"));
    const int code = sqlite3_step(s.get());
    if (code != SQLITE_ROW) return failure("check", code);
    const std::string answer = column_bytes(s.get(), 0);
    return answer == "ok" ? ok_status() : damaged(answer);
  }

  Status load() {
    ASSIGN_OR_RETURN(restored_, read());
    if (!restored_) return ok_status();
    if (limits::has_unknown_value(*restored_, pb::Durable::kPhaseFieldNumber))
      return invalid_argument(
          path_ +
          ": the phase of the job is of a later release of remesh; "
          "continue with that release");
    known_ = checksum_of(restored_->SerializeAsString());
    return ok_status();
  }

  // Inside a transaction: ok if the state is the one that this object knows, or
  // of an older coordinator.
  Status check_mine(uint64_t epoch) {
    ASSIGN_OR_RETURN(const std::optional<pb::Durable> there, read());
    if (!there || there->epoch() < epoch) return ok_status();
    const int64_t found = checksum_of(there->SerializeAsString());
    if (there->epoch() == epoch && (found == known_ || found == tried_))
      return ok_status();
    return cancelled(
        fmt::format("{}: another coordinator, of epoch {}, has written to the "
                    "journal; this one, of epoch {}, is not in charge any more",
                    path_, there->epoch(), epoch));
  }

  // The state in the file; nothing if there is none yet.
  Result<std::optional<pb::Durable>> read() {
    std::optional<pb::Durable> none;
    ASSIGN_OR_RETURN(Statement s,
                     prepare("SELECT durable, checksum FROM state"));
    const int code = sqlite3_step(s.get());
    if (code == SQLITE_DONE) return none;
    if (code != SQLITE_ROW) return failure("read the state", code);
    const std::string bytes = column_bytes(s.get(), 0);
    if (sqlite3_column_int64(s.get(), 1) != checksum_of(bytes)) {
      return damaged("the state does not match its checksum");
    }
    pb::Durable durable;
    if (!durable.ParseFromString(bytes)) {
      return damaged("the state cannot be decoded");
    }
    return std::optional<pb::Durable>(std::move(durable));
  }

  // Inside a transaction.
  Status write(const pb::Durable& durable) {
    const std::string bytes = durable.SerializeAsString();
    ASSIGN_OR_RETURN(Statement state,
                     prepare("INSERT OR REPLACE INTO state VALUES (1, ?, ?)"));
    sqlite3_bind_blob64(state.get(), 1, bytes.data(), bytes.size(),
                        SQLITE_STATIC);
    sqlite3_bind_int64(state.get(), 2, checksum_of(bytes));
    const int code = sqlite3_step(state.get());
    return code == SQLITE_DONE ? ok_status() : failure("write", code);
  }

  std::string path_;
  Db db_;
  std::optional<pb::Durable> restored_;
  // Checksums of the newest state written or read, and of the last one whose
  // write was begun: a failure may come after the commit.
  int64_t known_ = 0, tried_ = 0;
};

// Creates an empty journal, complete from the moment that `path` exists.
Status create_journal(FileSystem& fs, const std::string& path) {
  const std::string temporary = path + ".new";
  RETURN_IF_ERROR(remove_all(fs, temporary));
  RETURN_IF_ERROR(remove_all(fs, temporary + "-journal"));
  {
    SqliteJournal fresh(temporary);
    RETURN_IF_ERROR(fresh.make());
  }
  RETURN_IF_ERROR(remove_all(fs, temporary + "-journal"));
  // A rollback journal here belongs to a file that was moved away.
  RETURN_IF_ERROR(remove_all(fs, path + "-journal"));
  RETURN_IF_ERROR(fs.rename(temporary, path));
  return fs.sync_dir(parent_path(path));
}

}  // namespace

Result<std::unique_ptr<Journal>> Journal::open(FileSystem& fs,
                                               const std::string& path) {
  if (!fs.exists(path)) RETURN_IF_ERROR(create_journal(fs, path));
  auto journal = std::make_unique<SqliteJournal>(path);
  RETURN_IF_ERROR(journal->start());
  return std::unique_ptr<Journal>(std::move(journal));
}

}  // namespace remesh::server

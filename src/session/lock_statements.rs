//! The statements of module `lock`, once, with their meaning; see [`super::statements`].

use std::fmt::Write as _;
use std::time::Duration;

use super::statements::Sql;

/// Tries for the key `$1` on a session of which all else is known, and gives it the time to live
/// `$2` if it was granted; `$2` null leaves its idle limit alone. Null: held elsewhere.
pub(crate) const LOCK_TRY_KNOWN: Sql = Sql {
    name: "lock_try_known",
    text: "/* leasehold lock_try_known */ \
SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($1::pg_catalog.int8) THEN \
  CASE WHEN $2::pg_catalog.text IS NULL THEN '' ELSE \
    pg_catalog.set_config('idle_session_timeout', $2, false) END END",
};

/// [`LOCK_TRY_KNOWN`] in shared mode.
pub(crate) const LOCK_TRY_KNOWN_SHARED: Sql = Sql {
    name: "lock_try_known_shared",
    text: "/* leasehold lock_try_known_shared */ \
SELECT CASE WHEN pg_catalog.pg_try_advisory_lock_shared($1::pg_catalog.int8) THEN \
  CASE WHEN $2::pg_catalog.text IS NULL THEN '' ELSE \
    pg_catalog.set_config('idle_session_timeout', $2, false) END END",
};

/// Tries for the key `$1`, and gives the session the time to live `$2` if it was granted.
///
/// Tells backend pid, whether the server is a standby (on which nothing is tried), the grant, and
/// the former idle limit, which is null before PostgreSQL 14. `$2` null leaves the limit alone.
pub(crate) const LOCK_TRY: Sql = Sql {
    name: "lock_try",
    text: "/* leasehold lock_try */ \
SELECT s.pid, s.standby, s.locked, s.idle, \
  CASE WHEN s.locked AND s.idle IS NOT NULL AND $2::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $2, false) END \
FROM (SELECT pg_catalog.pg_backend_pid() AS pid, pg_catalog.pg_is_in_recovery() AS standby, \
        pg_catalog.current_setting('idle_session_timeout', true) AS idle, \
        CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN \
          pg_catalog.pg_try_advisory_lock($1::pg_catalog.int8) END AS locked OFFSET 0) s",
};

/// [`LOCK_TRY`] in shared mode.
pub(crate) const LOCK_TRY_SHARED: Sql = Sql {
    name: "lock_try_shared",
    text: "/* leasehold lock_try_shared */ \
SELECT s.pid, s.standby, s.locked, s.idle, \
  CASE WHEN s.locked AND s.idle IS NOT NULL AND $2::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $2, false) END \
FROM (SELECT pg_catalog.pg_backend_pid() AS pid, pg_catalog.pg_is_in_recovery() AS standby, \
        pg_catalog.current_setting('idle_session_timeout', true) AS idle, \
        CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN \
          pg_catalog.pg_try_advisory_lock_shared($1::pg_catalog.int8) END AS locked OFFSET 0) s",
};

/// Unlocks the key `$1` and gives the session its idle limit `$2` back, if not null. Tells backend
/// pid, and whether the lock was held.
pub(crate) const LOCK_RELEASE: Sql = Sql {
    name: "lock_release",
    text: "/* leasehold lock_release */ \
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_advisory_unlock($1::pg_catalog.int8), \
  CASE WHEN $2::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $2, false) END",
};

/// [`LOCK_RELEASE`] in shared mode.
pub(crate) const LOCK_RELEASE_SHARED: Sql = Sql {
    name: "lock_release_shared",
    text: "/* leasehold lock_release_shared */ \
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_advisory_unlock_shared($1::pg_catalog.int8), \
  CASE WHEN $2::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $2, false) END",
};

/// Proves that this session holds the key with the halves `$1` and `$2` in mode `$3`, and gives it
/// the time to live `$4` if so, if not null. Tells backend pid and the proof.
pub(crate) const LOCK_REFRESH: Sql = Sql {
    name: "lock_refresh",
    text: "/* leasehold lock_refresh */ \
SELECT pg_catalog.pg_backend_pid(), s.owned, \
  CASE WHEN s.owned AND $4::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $4, false) END \
FROM (SELECT EXISTS ( \
        SELECT FROM pg_catalog.pg_locks l \
        WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted \
          AND l.pid = pg_catalog.pg_backend_pid() \
          AND l.classid = $1::pg_catalog.oid AND l.objid = $2::pg_catalog.oid \
          AND l.mode = $3::pg_catalog.text \
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d \
                            WHERE d.datname = pg_catalog.current_database())) AS owned \
      OFFSET 0) s",
};

/// Takes a fencing token under a lock that is held: transaction id and timeline. The transaction is
/// flushed whatever the session's setting, so that a crash of the server cannot give its id away
/// again.
pub(crate) const LOCK_TOKEN: Sql = Sql {
    name: "lock_token",
    text: "/* leasehold lock_token */ \
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_current_xact_id()::pg_catalog.text, \
  pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8), \
  pg_catalog.pg_logical_emit_message(true, 'leasehold', '')::pg_catalog.text, \
  pg_catalog.set_config('synchronous_commit', 'local', true)",
};

/// Who answers: backend pid, whether it is a standby, version.
pub(crate) const LOCK_PING: Sql = Sql {
    name: "lock_ping",
    text: "/* leasehold lock_ping */ \
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(), \
  pg_catalog.current_setting('server_version_num')::pg_catalog.int4",
};

/// Ends the session that runs it: the only way to keep a user's pool from using it again.
pub(crate) const LOCK_TERMINATE: Sql = Sql {
    name: "lock_terminate",
    text: "/* leasehold lock_terminate */ \
SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())",
};

/// Opens the transaction that pins one server session of a pooler, for the proof.
pub(crate) const LOCK_PIN: Sql =
    Sql { name: "lock_pin", text: "/* leasehold lock_pin */ BEGIN READ ONLY" };

/// Ends a transaction of ours in good order.
pub(crate) const SCOPE_COMMIT: Sql =
    Sql { name: "scope_commit", text: "/* leasehold scope_commit */ COMMIT" };

/// Ends a transaction of ours.
pub(crate) const SCOPE_ROLLBACK: Sql =
    Sql { name: "scope_rollback", text: "/* leasehold scope_rollback */ ROLLBACK" };

/// The name of what [`scope_begin`] makes.
pub(crate) const SCOPE_BEGIN: &str = "scope_begin";

/// `client_connection_check_interval` came with PostgreSQL 14.
const CONNECTION_CHECK_SINCE: i32 = 140_000;
/// `transaction_timeout` came with PostgreSQL 17.
const TRANSACTION_TIMEOUT_SINCE: i32 = 170_000;

/// How a scoped lock is to be taken.
#[derive(Copy, Clone, Debug)]
pub(crate) struct ScopeBegin {
    pub(crate) key: i64,
    pub(crate) shared: bool,
    /// Waits in the server's queue.
    pub(crate) wait: bool,
    /// The longest wait; zero for no limit.
    pub(crate) lock_timeout: Duration,
    /// How long the server lets the transaction be idle, and last; zero for no limit.
    pub(crate) max_hold: Duration,
    pub(crate) server_version: i32,
    /// Lets the server look, while it waits, whether the client is still there.
    pub(crate) check_connection: bool,
}

/// Opens a read-only transaction with limits of its own and takes a lock in it: one message of the
/// simple protocol, so one round trip, and no portal that would keep a snapshot while the closure
/// runs. The last statement tells backend pid, standby, and the grant (null after a wait).
pub(crate) fn scope_begin(scope: &ScopeBegin) -> String {
    let millis = |d: Duration| u64::try_from(d.as_micros().div_ceil(1000)).unwrap_or(0);
    let hold = millis(scope.max_hold);
    let mut text = format!(
        "/* leasehold scope_begin */ BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; \
         SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {}; \
         SET LOCAL idle_in_transaction_session_timeout = {hold}; ",
        millis(scope.lock_timeout),
    );
    let mut set = |setting: &str, value: u64| {
        // Writing to a string cannot fail.
        write!(text, "SET LOCAL {setting} = {value}; ").unwrap_or_default();
    };
    if scope.server_version >= TRANSACTION_TIMEOUT_SINCE {
        set("transaction_timeout", 0);
    }
    if scope.wait && scope.check_connection && scope.server_version >= CONNECTION_CHECK_SINCE {
        set("client_connection_check_interval", 1000);
    }
    let function = match (scope.wait, scope.shared) {
        (true, false) => "pg_advisory_xact_lock",
        (true, true) => "pg_advisory_xact_lock_shared",
        (false, false) => "pg_try_advisory_xact_lock",
        (false, true) => "pg_try_advisory_xact_lock_shared",
    };
    text.push_str("SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(), ");
    write!(text, "pg_catalog.{function}({}::pg_catalog.int8)", scope.key).unwrap_or_default();
    text
}

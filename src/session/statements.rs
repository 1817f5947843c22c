//! Every statement that is sent to the server, once, with its meaning.
//!
//! Each starts with a comment that names it, so that the server's log reads as a story. Functions
//! are named with `pg_catalog`, so that nothing on a search path can stand in for them. Keys go as
//! arrays: any number of leases is one round trip.

/// A statement and the name under which errors and the server's log know it.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Sql {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

/// Who answers: backend pid, version, database, whether it is a standby, its timeline, and when the
/// server was started, which tells it from every other.
///
/// The timeline is the first 8 hex digits of the current WAL file's name; `pg_control_checkpoint`
/// would lag behind a promotion.
pub(crate) const HELLO: Sql = Sql {
    name: "hello",
    text: "/* leasehold hello */ \
SELECT pg_catalog.pg_backend_pid(), \
  pg_catalog.current_setting('server_version_num')::pg_catalog.int4, \
  (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()), \
  pg_catalog.pg_is_in_recovery(), \
  CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.substr( \
    pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END, \
  pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time())",
};

/// Which backend runs this statement.
pub(crate) const PID: Sql =
    Sql { name: "pid", text: "/* leasehold pid */ SELECT pg_catalog.pg_backend_pid()" };

/// Opens the transaction that pins a server connection of a transaction pooler.
pub(crate) const PIN: Sql = Sql { name: "pin", text: "/* leasehold pin */ BEGIN READ ONLY" };

/// Tries a lock inside the pinning transaction; it goes with the transaction.
pub(crate) const PROBE_SCOPED: Sql = Sql {
    name: "probe_scoped",
    text: "/* leasehold probe_scoped */ SELECT pg_catalog.pg_try_advisory_xact_lock($1)",
};

/// Takes a session lock on a key that nobody else uses.
pub(crate) const PROBE_LOCK: Sql = Sql {
    name: "probe_lock",
    text: "/* leasehold probe_lock */ SELECT pg_catalog.pg_try_advisory_lock($1)",
};

/// Gives the probing lock back.
pub(crate) const PROBE_UNLOCK: Sql = Sql {
    name: "probe_unlock",
    text: "/* leasehold probe_unlock */ SELECT pg_catalog.pg_advisory_unlock($1)",
};

/// Changes those of the settings `$1` that this server has to `$2`, for the session, and tells
/// their names and former values.
pub(crate) const SETTINGS: Sql = Sql {
    name: "settings",
    text: "/* leasehold settings */ \
SELECT s.name, s.setting, pg_catalog.set_config(s.name, w.value, false) \
FROM pg_catalog.pg_settings s \
JOIN ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
  pg_catalog.unnest($2::pg_catalog.text[])) AS w (name, value) \
  ON s.name = w.name",
};

/// Subscribes to the channel on which releases are told.
pub(crate) const LISTEN: Sql =
    Sql { name: "listen", text: "/* leasehold listen */ LISTEN leasehold" };

/// The channel of [`LISTEN`].
pub(crate) const CHANNEL: &str = "leasehold";

/// Sends a message on the channel of releases.
pub(crate) const NOTIFY: Sql = Sql {
    name: "notify",
    text: "/* leasehold notify */ SELECT pg_catalog.pg_notify('leasehold', $1)",
};

/// Tries for the keys `$1`, and takes a token if any was granted; then tries, for each key that was
/// granted, for its fence, from `$2`, and tells the keys whose fence is busy.
///
/// The inner query tries all keys before the outer one is evaluated, so the transaction id is
/// assigned after the last grant: tokens of one key grow. `pg_logical_emit_message` gives the
/// transaction something to flush, without which a crash of the server would let its id be used
/// again. A fence is busy while a guarded transaction of an earlier term is open. `$3` replaces the
/// session's idle time-out while leases are held, if not null.
pub(crate) const TRY_LOCK: Sql = Sql {
    name: "try_lock",
    text: "/* leasehold try_lock */ \
SELECT t.granted, \
  CASE WHEN t.granted IS NOT NULL THEN pg_catalog.pg_current_xact_id()::pg_catalog.text END, \
  CASE WHEN t.granted IS NOT NULL THEN pg_catalog.substr( \
    pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END, \
  CASE WHEN t.granted IS NOT NULL THEN \
    pg_catalog.pg_logical_emit_message(true, 'leasehold', '')::pg_catalog.text END, \
  CASE WHEN t.granted IS NOT NULL THEN ARRAY( \
    SELECT p.key FROM ROWS FROM (pg_catalog.unnest($1), \
      pg_catalog.unnest($2::pg_catalog.int8[])) AS p (key, fence) \
    WHERE CASE WHEN p.key = ANY (t.granted) \
      THEN NOT pg_catalog.pg_try_advisory_xact_lock(p.fence) ELSE false END) END, \
  CASE WHEN t.granted IS NOT NULL AND $3::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $3, false) END \
FROM (SELECT pg_catalog.array_agg(l.key) FILTER (WHERE l.locked) AS granted \
      FROM (SELECT k.key, pg_catalog.pg_try_advisory_lock(k.key) AS locked \
            FROM pg_catalog.unnest($1::pg_catalog.int8[]) AS k (key) OFFSET 0) l) t",
};

/// Tries for the fences `$1`, for the length of the statement; tells those that are busy, and which
/// backends of database `$2` keep them so.
pub(crate) const TRY_FENCES: Sql = Sql {
    name: "try_fences",
    text: "/* leasehold try_fences */ \
SELECT f.fence, ARRAY( \
    SELECT l.pid FROM pg_catalog.pg_locks l \
    WHERE l.locktype = 'advisory' AND l.database = $2 AND l.objsubid = 1 AND l.granted \
      AND ((l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8) = f.fence) \
FROM (SELECT k.fence, pg_catalog.pg_try_advisory_xact_lock(k.fence) AS free \
      FROM pg_catalog.unnest($1::pg_catalog.int8[]) AS k (fence) OFFSET 0) f \
WHERE NOT f.free",
};

/// Ends the backends `$1`, whose guarded transactions keep a new term from starting.
pub(crate) const TERMINATE: Sql = Sql {
    name: "terminate",
    text: "/* leasehold terminate */ \
SELECT pg_catalog.pg_terminate_backend(p.pid) \
FROM pg_catalog.unnest($1::pg_catalog.int4[]) AS p (pid)",
};

/// Takes the session's beacon: a lock that says who this session is, and whose release says that it
/// ended. `$1` is the class of all beacons.
pub(crate) const BEACON: Sql = Sql {
    name: "beacon",
    text: "/* leasehold beacon */ SELECT pg_catalog.pg_try_advisory_lock($1, $2)",
};

/// In a guarded transaction of the caller's: takes its side of the fence `$1`, and limits for how
/// long it may sit idle, to `$2` milliseconds. False if a new term is being started. Also whether
/// the transaction cannot write, and which server it is on.
pub(crate) const GUARD: Sql = Sql {
    name: "guard",
    text: "/* leasehold guard */ \
SELECT pg_catalog.pg_try_advisory_xact_lock_shared($1), \
  pg_catalog.current_setting('transaction_read_only') = 'on', \
  pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()), \
  (SELECT CASE WHEN s.setting = '0' OR s.setting::pg_catalog.int8 > $2 \
     THEN pg_catalog.set_config(s.name, $2::pg_catalog.text, true) END \
   FROM pg_catalog.pg_settings s WHERE s.name = 'idle_in_transaction_session_timeout')",
};

/// In a guarded transaction, after [`GUARD`]: whether the session with pid `$1` and beacon `$2`,
/// `$3` exists, in which database, and whether it holds the key with the halves `$4` and `$5` in
/// this one.
pub(crate) const GUARD_CHECK: Sql = Sql {
    name: "guard_check",
    text: "/* leasehold guard_check */ \
SELECT pg_catalog.bool_or(l.objsubid = 2 AND l.classid = $2 AND l.objid = $3 AND l.database = d.oid), \
  pg_catalog.bool_or(l.objsubid = 2 AND l.classid = $2 AND l.objid = $3), \
  pg_catalog.bool_or(l.objsubid = 1 AND l.classid = $4 AND l.objid = $5 AND l.database = d.oid \
    AND l.mode = 'ExclusiveLock') \
FROM pg_catalog.pg_locks l, pg_catalog.pg_database d \
WHERE d.datname = pg_catalog.current_database() \
  AND l.locktype = 'advisory' AND l.granted AND l.pid = $1",
};

/// Which sessions hold the keys `$1` in database `$2`: the key, the pid, and the low half of the
/// session's beacon in class `$3`, or null if it has none.
pub(crate) const HOLDERS: Sql = Sql {
    name: "holders",
    text: "/* leasehold holders */ \
SELECT h.key, h.pid, b.objid \
FROM (SELECT (l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8 AS key, l.pid \
      FROM pg_catalog.pg_locks l \
      WHERE l.locktype = 'advisory' AND l.database = $2 AND l.objsubid = 1 AND l.granted) h \
LEFT JOIN pg_catalog.pg_locks b ON b.pid = h.pid AND b.locktype = 'advisory' \
  AND b.database = $2 AND b.objsubid = 2 AND b.classid = $3 AND b.granted AND b.mode = 'ExclusiveLock' \
WHERE h.key = ANY ($1::pg_catalog.int8[])",
};

/// Waits, in a session with a `lock_timeout`, until the session with beacon `$1`, `$2` has ended.
pub(crate) const WATCH: Sql = Sql {
    name: "watch",
    text: "/* leasehold watch */ SELECT pg_catalog.pg_advisory_lock_shared($1, $2)::pg_catalog.text",
};

/// Gives the beacon `$1`, `$2` back after [`WATCH`], also after an error: it may be held.
pub(crate) const UNWATCH: Sql = Sql {
    name: "unwatch",
    text: "/* leasehold unwatch */ SELECT pg_catalog.pg_advisory_unlock_shared($1, $2)",
};

/// Unlocks the keys `$1` and tells the standbys, in one statement: a standby that hears of it finds
/// the lock free. The message is `r` and the key. `$2` replaces the session's idle time-out if not
/// null.
pub(crate) const UNLOCK: Sql = Sql {
    name: "unlock",
    text: "/* leasehold unlock */ \
SELECT k.key, pg_catalog.pg_advisory_unlock(k.key), \
  pg_catalog.pg_notify('leasehold', 'r' || k.key::pg_catalog.text), \
  CASE WHEN $2::pg_catalog.text IS NOT NULL THEN \
    pg_catalog.set_config('idle_session_timeout', $2, false) END \
FROM pg_catalog.unnest($1::pg_catalog.int8[]) AS k (key)",
};

/// Unlocks the keys `$1` and tells nobody: for locks nobody knew of, and where `NOTIFY` fails.
pub(crate) const UNLOCK_QUIETLY: Sql = Sql {
    name: "unlock_quietly",
    text: "/* leasehold unlock_quietly */ \
SELECT k.key, pg_catalog.pg_advisory_unlock(k.key) \
FROM pg_catalog.unnest($1::pg_catalog.int8[]) AS k (key)",
};

/// Proves that this session still is who it was and holds the keys `$1` of database `$2`: backend
/// pid, standby, timeline, and the keys that are missing.
///
/// `pg_locks` shows the whole cluster, and a `bigint` key as two unsigned halves with `objsubid` 1.
pub(crate) const HEARTBEAT: Sql = Sql {
    name: "heartbeat",
    text: "/* leasehold heartbeat */ \
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(), \
  CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.substr( \
    pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END, \
  CASE WHEN pg_catalog.array_length($1::pg_catalog.int8[], 1) > 0 THEN ARRAY( \
    SELECT k.key FROM pg_catalog.unnest($1) AS k (key) \
    EXCEPT \
    SELECT (l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8 \
    FROM pg_catalog.pg_locks l \
    WHERE l.locktype = 'advisory' AND l.database = $2 AND l.objsubid = 1 \
      AND l.pid = pg_catalog.pg_backend_pid() AND l.mode = 'ExclusiveLock' AND l.granted) \
  ELSE '{}'::pg_catalog.int8[] END",
};

/// Which of the keys `$1` this session holds in database `$2`, after a statement whose outcome is
/// unknown.
pub(crate) const ASK: Sql = Sql {
    name: "ask",
    text: "/* leasehold ask */ \
SELECT (l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8 \
FROM pg_catalog.pg_locks l \
WHERE l.locktype = 'advisory' AND l.database = $2 AND l.objsubid = 1 \
  AND l.pid = pg_catalog.pg_backend_pid() AND l.granted \
  AND ((l.classid::pg_catalog.int8 << 32) | l.objid::pg_catalog.int8) = ANY ($1::pg_catalog.int8[])",
};

/// Who holds the key with the halves `$1` and `$2` in database `$3`. `pg_stat_activity` hides the
/// details of other roles' sessions from those without `pg_read_all_stats`.
pub(crate) const HOLDER: Sql = Sql {
    name: "holder",
    text: "/* leasehold holder */ \
SELECT l.pid, a.application_name, pg_catalog.host(a.client_addr), a.backend_start \
FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
WHERE l.locktype = 'advisory' AND l.database = $3 AND l.objsubid = 1 \
  AND l.classid = $1 AND l.objid = $2 AND l.granted AND l.mode = 'ExclusiveLock' \
LIMIT 1",
};

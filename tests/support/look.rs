//! A second pair of eyes on the server, and waits that end.

use std::time::{Duration, Instant, SystemTime};

use leasehold::postgres::Client;

/// Waits until `happened`; fails after `bound`. Gives the time it took.
pub fn wait_until(what: &str, bound: Duration, mut happened: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < bound, "after {bound:?} still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

/// A row of `pg_locks` for an advisory lock of the current database with a `bigint` key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockRow {
    pub pid: i32,
    pub key: i64,
    pub granted: bool,
}

/// Every advisory lock with a `bigint` key in the current database.
pub fn advisory_locks(client: &mut Client) -> Vec<LockRow> {
    let rows = client.query(
        "SELECT pid, (classid::int8 << 32) | objid::int8, granted FROM pg_locks \
         WHERE locktype = 'advisory' AND objsubid = 1 \
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        &[],
    );
    let rows = rows.unwrap().into_iter();
    rows.map(|row| LockRow { pid: row.get(0), key: row.get(1), granted: row.get(2) }).collect()
}

/// The backend that holds `key`.
pub fn holder_pid(client: &mut Client, key: i64) -> Option<i32> {
    let locks = advisory_locks(client);
    locks.into_iter().find(|lock| lock.key == key && lock.granted).map(|lock| lock.pid)
}

/// A row of `pg_stat_activity`.
#[derive(Clone, Debug)]
pub struct SessionRow {
    pub pid: i32,
    pub state: String,
    pub backend_xmin: Option<String>,
    pub query: String,
    pub query_start: Option<SystemTime>,
    pub wait_event_type: Option<String>,
}

/// The sessions with this `application_name`.
pub fn sessions(client: &mut Client, application: &str) -> Vec<SessionRow> {
    let rows = client.query(
        "SELECT pid, coalesce(state, ''), backend_xmin::text, query, query_start, wait_event_type \
         FROM pg_stat_activity WHERE application_name = $1",
        &[&application],
    );
    let rows = rows.unwrap().into_iter();
    rows.map(|row| SessionRow {
        pid: row.get(0),
        state: row.get(1),
        backend_xmin: row.get(2),
        query: row.get(3),
        query_start: row.get(4),
        wait_event_type: row.get(5),
    })
    .collect()
}

/// How many sessions have this `application_name`.
pub fn backend_count(client: &mut Client, application: &str) -> usize {
    sessions(client, application).len()
}

/// How many statements of sessions with this `application_name` are in a server's log, which holds
/// them if it was started with `log_statement = all`.
///
/// The log ends each line's head with the name: `%m [%p] %a`. What a parameter or a later line of a
/// statement holds is no head.
pub fn statements(log: &str, application: &str) -> usize {
    let heads = log.lines().filter_map(|line| line.split_once("] "));
    let bodies = heads.filter_map(|(_, rest)| rest.strip_prefix(application));
    let statement =
        |body: &&str| body.starts_with(" LOG:  statement: ") || body.starts_with(" LOG:  execute ");
    bodies.filter(statement).count()
}

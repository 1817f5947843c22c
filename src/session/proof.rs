//! The proof that an endpoint keeps one server session per connection.
//!
//! A transaction pooler answers everything and keeps nothing: its next statement may run in another
//! server session, and a lock taken through it stays behind. So before a session is used, a second
//! connection pins a server session in a transaction while the first is idle. If both see one
//! backend, or the first is moved to another, or a lock that the first holds is granted to the
//! second, or cannot be given back, then sessions are not kept. Nothing that outlives a transaction
//! is set on the first connection before that.

use postgres::types::Type;

use super::statements::{self, Sql};
use super::{Session, get, one};
use crate::error::Error;

/// How often the first connection is asked who it is while the second pins its session. A busy pool
/// may hand out the same server session a few times in a row.
const PROOF_ROUNDS: usize = 6;

/// What the proof says.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Sessions are kept.
    Kept,
    /// They are not.
    Swapped,
    /// The second connection was ended because it wanted a transaction: once may be chance.
    NoTransactions,
}

/// Proves it with two connections; `first` is the one to be used. See the head of this file.
pub(super) fn prove_apart(first: &mut Session, second: &mut Session) -> Result<Verdict, Error> {
    if let Err(error) = second.simple(statements::PIN) {
        // A pooler in statement mode ends a connection that begins a transaction.
        let refused = second.is_broken() && !matches!(error, Error::Timeout(_));
        if !refused {
            return Err(error);
        }
        let moved = ask_pid(first)? != first.facts.pid;
        return Ok(if moved { Verdict::Swapped } else { Verdict::NoTransactions });
    }
    if ask_pid(second)? == first.facts.pid {
        return Ok(Verdict::Swapped);
    }
    for _ in 0..PROOF_ROUNDS {
        if ask_pid(first)? != first.facts.pid {
            return Ok(Verdict::Swapped);
        }
    }
    // An endpoint may keep sessions and still have lock functions that do nothing.
    let key = fastrand::i64(..);
    if !ask_bool(first, statements::PROBE_LOCK, key)? {
        return Err(Error::Protocol(statements::PROBE_LOCK.name));
    }
    let shared = ask_bool(second, statements::PROBE_SCOPED, key)?;
    let returned = ask_bool(first, statements::PROBE_UNLOCK, key)?;
    let moved = ask_pid(first)? != first.facts.pid;
    Ok(if shared || !returned || moved { Verdict::Swapped } else { Verdict::Kept })
}

fn ask_pid(session: &mut Session) -> Result<i32, Error> {
    let rows = session.query_once(statements::PID, &[])?;
    get(statements::PID, one(statements::PID, &rows)?, 0)
}

fn ask_bool(session: &mut Session, sql: Sql, key: i64) -> Result<bool, Error> {
    let rows = session.query_once(sql, &[(&key, Type::INT8)])?;
    get(sql, one(sql, &rows)?, 0)
}

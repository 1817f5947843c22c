//! The fence between a term and the next: transactions that a former leader cannot commit.
//!
//! # Protocol
//!
//! `L` is a lease's lock, held by its session. `F`, the fence, is another advisory lock, derived from
//! `L`, and only ever held inside a transaction.
//!
//! - A guarded transaction takes `F` in shared mode, and *then* looks whether the lease's session
//!   still holds `L`. If not, it is refused. If so, it goes on, with `F` held until it ends.
//! - A new leader takes `L`, and *then* `F` in exclusive mode, once, before its job starts.
//!
//! If the guard saw `L` held, the new leader took `L` after that, and finds `F` busy until the
//! transaction has ended. If the new leader took `F` first, the guard is refused. So no guarded
//! transaction of an earlier term commits after the new term's job has started. `pg_locks` and
//! advisory locks are no part of a snapshot, so the transaction's isolation level does not matter.
//!
//! Neither side waits in the server. The guard only *tries* for `F`: exclusively it is held by a new
//! leader alone, so a busy fence means that the term is over. The new leader tries again every few
//! milliseconds, and after the patience given below ends the backends that keep the fence busy: their
//! term is over, so whatever they do is void.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::Transaction;
use postgres::types::Type;

use crate::clock::Tick;
use crate::error::{Error, GuardRefusal, LostReason};
use crate::event::Event;
use crate::key::Key;
use crate::lease::lease::{Core, Lease};
use crate::lease::mailbox::Acquire;
use crate::lease::owner::Owner;
use crate::session::{BEACON_CLASS, statements};

/// The namespace of fences: the bytes of `fenc`.
const FENCE_NAMESPACE: i32 = i32::from_be_bytes(*b"fenc");
/// Between two looks at a busy fence.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The fence of a lease.
pub(crate) fn fence(key: Key) -> i64 {
    Key::new(FENCE_NAMESPACE, &format!("{:016x}", key.as_i64())).as_i64()
}

/// A term that cannot begin yet.
pub(crate) struct Fenced {
    pub(crate) acquire: Acquire,
    pub(crate) core: Arc<Core>,
    since: Instant,
    told: bool,
    ended_others: bool,
}

impl Fenced {
    pub(crate) fn new(acquire: Acquire, core: Arc<Core>) -> Fenced {
        Fenced { acquire, core, since: Instant::now(), told: false, ended_others: false }
    }
}

impl Owner {
    /// When the next look at busy fences is due.
    pub(crate) fn fences_due(&self) -> Option<Instant> {
        (!self.fenced.is_empty()).then_some(self.fences_at)
    }

    /// Starts the terms whose fence has become free.
    pub(crate) fn serve_fences(&mut self) {
        if self.fenced.is_empty() || Instant::now() < self.fences_at {
            return;
        }
        self.fences_at = Instant::now() + LOOK_AGAIN;
        let fences: Vec<i64> = self.fenced.iter().map(|term| fence(term.core.key)).collect();
        let Some(live) = &mut self.live else { return self.fenced.clear() };
        let start: Tick = live.life.clock.now();
        let busy = match live.session.busy_fences(&fences) {
            Ok(busy) => busy,
            Err(error) => {
                self.survived(&error);
                return self.setup.events.send(Event::TryFailed { error });
            }
        };
        self.answered(start);
        let patience = self.setup.options.query_timeout / 2;
        let mut doomed = Vec::new();
        for mut term in std::mem::take(&mut self.fenced) {
            let fence = fence(term.core.key);
            let Some((_, pids)) = busy.iter().find(|(each, _)| *each == fence) else {
                self.start_term(term.acquire, term.core);
                continue;
            };
            if !std::mem::replace(&mut term.told, true) {
                self.setup.events.send(Event::Fenced {
                    name: Arc::clone(&term.core.name),
                    key: term.core.key,
                    pids: pids.clone(),
                });
            }
            if term.since.elapsed() >= patience && !term.ended_others {
                term.ended_others = true;
                doomed.extend(pids);
            }
            self.fenced.push(term);
        }
        if let (false, Some(live)) = (doomed.is_empty(), &mut self.live) {
            if let Err(error) = live.session.terminate(&doomed) {
                self.survived(&error);
                self.setup.events.send(Event::TryFailed { error });
            }
        }
    }
}

impl Lease {
    /// Ties the caller's transaction to this term: it cannot commit after a later term's job has
    /// started, at any isolation level.
    ///
    /// Call it before the first write, on a transaction on the same database as the lease, over any
    /// connection, also one through a transaction pooler. It holds for this transaction only. Calling
    /// it again checks again. After an error, roll back.
    ///
    /// While a guarded transaction is open, the next term cannot start. So it must be short: it may
    /// be idle for at most the query time-out (`idle_in_transaction_session_timeout` is set for the
    /// transaction, unless it is shorter already), and after a loss the next leader waits for half
    /// its query time-out and then ends the backend, if its role may.
    ///
    /// Two round trips on the caller's connection; blocks for as long as that takes.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] or [`Error::NotHeld`] if the term is over: by our own clock, or because the
    /// server says so; [`Error::Forked`] in a forked child. [`Error::Guard`] if the transaction is on
    /// another database or server, or read-only. [`Error::Query`] if a statement failed, as in a
    /// transaction that failed before; [`Error::Protocol`] if its answer makes no sense.
    ///
    /// # Panics
    ///
    /// Where the driver does: on a thread that is inside an async runtime, on which no transaction of
    /// its can be used.
    ///
    /// # Examples
    ///
    /// A connection outside a transaction does not do:
    ///
    /// ```compile_fail
    /// # fn f(client: &mut leasehold::postgres::Client, lease: &leasehold::Lease) {
    /// lease.guard(client).unwrap();
    /// # }
    /// ```
    ///
    /// ```no_run
    /// # fn f(client: &mut leasehold::postgres::Client, lease: &leasehold::Lease) {
    /// lease.guard(&mut client.transaction().unwrap()).unwrap();
    /// # }
    /// ```
    pub fn guard(&self, transaction: &mut Transaction<'_>) -> Result<(), Error> {
        let core = &self.core;
        if let Some(error) = core.lost_or_left() {
            return Err(error);
        }
        let facts = core.life.facts;
        let idle = i64::try_from(core.life.pace.query_timeout.as_millis()).unwrap_or(i64::MAX);
        let sql = statements::GUARD;
        let failed = |sql: statements::Sql| {
            move |source| Error::Query { statement: sql.name, source: Arc::new(source) }
        };
        let fence = fence(core.key);
        let rows = transaction
            .query_typed(sql.text, &[(&fence, Type::INT8), (&idle, Type::INT8)])
            .map_err(failed(sql))?;
        let row = rows.first().ok_or(Error::Protocol(sql.name))?;
        let free: bool = row.try_get(0).map_err(failed(sql))?;
        let read_only: bool = row.try_get(1).map_err(failed(sql))?;
        let server: f64 = row.try_get(2).map_err(failed(sql))?;
        if server.to_bits() != facts.server_start.to_bits() {
            return Err(self.over().unwrap_or(Error::Guard(GuardRefusal::OtherServer)));
        }

        let sql = statements::GUARD_CHECK;
        let [classid, objid] = halves(core.key);
        let (class, beacon) = (reinterpret(BEACON_CLASS), reinterpret(facts.beacon));
        let rows = transaction
            .query_typed(
                sql.text,
                &[
                    (&facts.pid, Type::INT4),
                    (&class, Type::OID),
                    (&beacon, Type::OID),
                    (&classid, Type::OID),
                    (&objid, Type::OID),
                ],
            )
            .map_err(failed(sql))?;
        let row = rows.first().ok_or(Error::Protocol(sql.name))?;
        let here = row.try_get::<_, Option<bool>>(0).map_err(failed(sql))? == Some(true);
        let anywhere = row.try_get::<_, Option<bool>>(1).map_err(failed(sql))? == Some(true);
        let holds = row.try_get::<_, Option<bool>>(2).map_err(failed(sql))? == Some(true);
        if anywhere && !here {
            return Err(Error::Guard(GuardRefusal::OtherDatabase));
        }
        if !(here && holds && free) {
            return Err(self.over().unwrap_or(Error::Lost(LostReason::NotOwner)));
        }
        if read_only {
            return Err(Error::Guard(GuardRefusal::ReadOnly));
        }
        // The answers may have come late.
        self.over().map_or(Ok(()), Err)
    }

    fn over(&self) -> Option<Error> {
        self.core.lost_or_left()
    }
}

/// A key as `pg_locks` shows it: two unsigned halves.
fn halves(key: Key) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = key.as_i64().to_be_bytes();
    [u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h])]
}

/// A signed key as `pg_locks` shows it.
fn reinterpret(key: i32) -> u32 {
    u32::from_ne_bytes(key.to_ne_bytes())
}

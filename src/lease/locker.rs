//! The front door: who may call what, how long it blocks, and what it answers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::{Config, Socket};

use crate::cancel::{CancelReason, CancellationToken};
use crate::error::{Error, RunError};
use crate::lease::engine::Engine;
use crate::lease::lease::{Lease, LeaseGuard};
use crate::lease::mailbox::Request;
use crate::lease::options::Options;
use crate::lease::term::Ended;
use crate::session::connect::Connector;

/// Who holds a lease, as the server shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Process id of the holder's backend, as in `pg_stat_activity`.
    pub pid: i32,
    /// The session's `application_name`. `None` if the server hides it from this role.
    pub application_name: Option<String>,
    /// The client's IP address. `None` over a Unix socket, or if the server hides it.
    pub client_addr: Option<String>,
    /// When the holder's session began; its lease began later. `None` if the server hides it.
    pub session_since: Option<SystemTime>,
}

/// Runs named jobs on one process at a time, and gives out leases.
///
/// A `Locker` has one session with the database, opened when it is first needed and opened again
/// whenever it is lost, and three threads: `leasehold-owner` talks to the server, `leasehold-clock`
/// watches the deadline, `leasehold-event` writes logs. With [`Options::watch`] there is one more of
/// each, `leasehold-watch` and its session. Clones share them. Share one per process;
/// every method can be called from any thread, also from one inside an async runtime, which it
/// blocks like any other.
///
/// Dropping the last clone returns at once; guards that are left keep the session until they are
/// dropped too. [`close`](Locker::close) waits.
///
/// After a `fork`, the child's copy answers [`Error::Forked`] and touches nothing of the parent's.
#[derive(Clone)]
pub struct Locker {
    engine: Arc<Engine>,
}

impl Locker {
    /// A locker on the database of `config`, without TLS. Does not connect yet, and does not block.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for options that cannot work, [`Error::Spawn`] if a thread cannot
    /// be started.
    pub fn new(config: Config, options: Options) -> Result<Locker, Error> {
        let connect = |options| Connector::plain(&config, options);
        Ok(Locker { engine: Arc::new(Engine::start(connect, options)?) })
    }

    /// A locker that secures its session with `tls` as `sslmode` in `config` says. Does not connect
    /// yet, and does not block.
    ///
    /// # Errors
    ///
    /// As [`Locker::new`].
    pub fn with_tls<T>(config: Config, tls: T, options: Options) -> Result<Locker, Error>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let connect = |options| Connector::with_tls(&config, tls.clone(), options);
        Ok(Locker { engine: Arc::new(Engine::start(connect, options)?) })
    }

    /// Runs `job` whenever this process wins the lease `name`, until the job returns.
    ///
    /// Blocks the calling thread, which supervises; the job runs on the thread `leasehold-job`, and
    /// may borrow from the caller. It may be called again after a loss, so it must be restartable.
    ///
    /// | what happens | `run` |
    /// | --- | --- |
    /// | `cancel` set | the job's token is set; the job returns; release; `Ok(())` |
    /// | lease lost, job returned (`Ok` or `Err`) | contends again; calls the job again on the next win |
    /// | job returned `Err(e)`, lease held | release, `Err(RunError::Job(e))` |
    /// | job returned `Ok(())`, lease held | release, `Ok(())` |
    /// | job panicked | release, then the panic goes on in the caller's thread |
    /// | [`close`](Locker::close), before or during | `Ok(())` |
    /// | [step-down](Locker::step_down) asked | the job's token is set; release; contends again after a cool-down |
    /// | database away, password wrong, standby | keeps contending, backing off up to the retry interval |
    ///
    /// The release comes after the job has returned, never before. It waits for the server's
    /// confirmation for at most the query time-out, also after a cancellation.
    ///
    /// # Errors
    ///
    /// `Lock(AlreadyRunning)`, at once, if the name is running or held on this `Locker`;
    /// `Lock(EmptyName)`, `Lock(KeyCollision)`, `Lock(Forked)`, `Lock(Spawn)`; and what waiting
    /// cannot mend: `Lock(TransactionPooling)`, `Lock(UnsupportedServer)`, `Lock(TokenExhausted)`,
    /// `Lock(Panicked)`.
    ///
    /// # Panics
    ///
    /// With the job's panic.
    pub fn run<F, E>(
        &self,
        cancel: &CancellationToken,
        name: &str,
        mut job: F,
    ) -> Result<(), RunError<E>>
    where
        F: FnMut(&Lease) -> Result<(), E> + Send,
        E: Send,
    {
        let slot = match self.engine.reserve(name, true) {
            Err(Error::Closed) => return Ok(()),
            other => other?,
        };
        loop {
            let held = match self.engine.contend(cancel, &slot) {
                Err(Error::Cancelled | Error::Closed) => return Ok(()),
                other => other?,
            };
            let Ended { value, lost, told } = self.engine.term(held, &slot, &mut job)?;
            let asked_to_end = cancel.is_cancelled() || self.engine.is_closing();
            match value {
                _ if asked_to_end => return Ok(()),
                _ if lost.is_some() => {}
                _ if told == Some(CancelReason::StepDown) => {
                    // A cancellation or a close ends this pause, and is seen at the next turn.
                    self.engine.cool_down(cancel, &slot);
                }
                Ok(()) => return Ok(()),
                Err(error) => return Err(RunError::Job(error)),
            }
        }
    }

    /// Runs `job` once, now, if the lease `name` is free: `Ok(None)` if it is held elsewhere.
    ///
    /// Blocks for at most the query time-out before the job starts, and after it has returned.
    /// Threads are as with [`run`](Locker::run). If `cancel` is set while the job runs, its token
    /// is set, and its result counts as it is.
    ///
    /// # Errors
    ///
    /// `Job(e)` if the job returned it. `Lock(Lost)` if the lease was lost before the job returned,
    /// whatever it returned: its work may have overlapped with another's. `Lock(Cancelled)` if
    /// `cancel` was set before, `Lock(Closed)` after [`close`](Locker::close), `Lock(Spawn)`, and
    /// those of [`try_acquire`](Locker::try_acquire).
    ///
    /// # Panics
    ///
    /// With the job's panic, after the release.
    pub fn try_run<T, F, E>(
        &self,
        cancel: &CancellationToken,
        name: &str,
        job: F,
    ) -> Result<Option<T>, RunError<E>>
    where
        F: FnOnce(&Lease) -> Result<T, E> + Send,
        T: Send,
        E: Send,
    {
        let slot = self.engine.reserve(name, true)?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled.into());
        }
        let Some(held) = self.engine.try_once(&slot, cancel)? else { return Ok(None) };
        let Ended { value, lost, .. } = self.engine.term(held, &slot, job)?;
        match (lost, value) {
            (Some(reason), _) => Err(Error::Lost(reason).into()),
            (None, Ok(value)) => Ok(Some(value)),
            (None, Err(error)) => Err(RunError::Job(error)),
        }
    }

    /// Takes the lease `name` if it is free; `Ok(None)` if it is held elsewhere. Blocks for at most
    /// the query time-out, connecting included.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyRunning`] if the name is running or held on this `Locker`,
    /// [`Error::EmptyName`], [`Error::KeyCollision`], [`Error::Closed`], [`Error::Forked`]; and
    /// what kept the server from being asked, or its answer from arriving. After any error the
    /// lease is not held by this process.
    pub fn try_acquire(&self, name: &str) -> Result<Option<LeaseGuard>, Error> {
        let slot = self.engine.reserve(name, false)?;
        let held = self.engine.try_once(&slot, &CancellationToken::new())?;
        Ok(held.map(|held| self.engine.guard(held, slot)))
    }

    /// Takes the lease `name`, waiting for it for at most `timeout`; `Ok(None)` if it was held
    /// elsewhere all the time.
    ///
    /// A `timeout` of zero is [`try_acquire`](Locker::try_acquire). Otherwise it blocks for at most
    /// `timeout`, a release elsewhere being noticed at once where notifications arrive, and else at
    /// the next try, a retry interval later. [`Duration::MAX`] waits for ever.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Locker::try_acquire), but an outage is waited out: an error about the
    /// database means that it was in that state at the end, [`Error::Timeout`] that there was no
    /// answer at all. What waiting cannot mend, such as [`Error::TransactionPooling`], ends the wait
    /// at once; so does [`close`](Locker::close), with [`Error::Closed`].
    pub fn acquire_timeout(
        &self,
        name: &str,
        timeout: Duration,
    ) -> Result<Option<LeaseGuard>, Error> {
        if timeout.is_zero() {
            return self.try_acquire(name);
        }
        let slot = self.engine.reserve(name, false)?;
        let held = self.engine.wait_for(&slot, &CancellationToken::new(), Some(timeout))?;
        Ok(held.map(|held| self.engine.guard(held, slot)))
    }

    /// Who holds the lease `name`, seen from anywhere; `None` if nobody does. One round trip; needs
    /// no privilege. Blocks for at most the query time-out, connecting included.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyName`], [`Error::Closed`], [`Error::Forked`], and what kept the server from
    /// being asked, or its answer from arriving.
    pub fn holder(&self, name: &str) -> Result<Option<Holder>, Error> {
        if name.is_empty() {
            return Err(Error::EmptyName);
        }
        let key = self.engine.key(name);
        let row = self.engine.ask(|reply, expires| Request::Holder { key, reply, expires })?;
        Ok(row.map(|row| Holder {
            pid: row.pid,
            application_name: row.application_name,
            client_addr: row.client_addr,
            session_since: row.backend_start,
        }))
    }

    /// Asks the holder of the lease `name`, wherever it is, to step down. True if it has heard: then
    /// its job's token is set with [`CancelReason::StepDown`], and after the job has returned and the
    /// lease is released, it does not contend for a retry interval, so that another can win.
    ///
    /// False if nobody holds it, or if the holder did not answer: it does not
    /// [allow it](Options::allow_step_down), is not of this library, or notifications do not arrive.
    ///
    /// Blocks for at most 2 s after the server answered, and for at most the query time-out in all.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyName`], [`Error::Closed`], [`Error::Forked`], and what kept the server from
    /// being asked, or its answer from arriving.
    pub fn step_down(&self, name: &str) -> Result<bool, Error> {
        if name.is_empty() {
            return Err(Error::EmptyName);
        }
        let key = self.engine.key(name);
        self.engine.ask(|reply, _| Request::StepDown { key, reply })
    }

    /// Connects if necessary, proves that the endpoint can hold leases, and that those of this
    /// `Locker` are held. Blocks for at most the query time-out.
    ///
    /// # Errors
    ///
    /// [`Error::TransactionPooling`], [`Error::NotPrimary`], [`Error::Closed`], [`Error::Forked`],
    /// [`Error::Lost`] if this is how a loss was found, and what kept the server from answering.
    pub fn ping(&self) -> Result<(), Error> {
        self.engine.ask(|reply, expires| Request::Ping { reply, expires })
    }

    /// Cancels all jobs with [`CancelReason::Closed`], waits for them, releases what guards hold,
    /// ends the session and the threads. Further calls answer [`Error::Closed`]; `run` returns
    /// `Ok(())`.
    ///
    /// Blocks for as long as the jobs take, and then for at most twice the query time-out.
    /// Heartbeats go on until the last job has returned. Called on the thread of a job of this
    /// `Locker`, it waits for no job, since one of them could be waiting for this one: it returns at
    /// once, and the session ends when the last job has returned. In a forked child it does nothing.
    pub fn close(&self) {
        if let Err(error) = self.engine.shut(None) {
            log::warn!(target: "leasehold", "close: {}", error.chain());
        }
    }

    /// [`close`](Locker::close), waiting for jobs for at most `grace`, and then for at most twice the
    /// query time-out for the session to end.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with [`Timeout::Close`](crate::Timeout::Close), which names the jobs that
    /// had not returned. Not from a job's thread, where nothing is waited for. They
    /// keep their leases, and heartbeats go on, until they return; closing again waits again.
    /// [`Error::Forked`] in a forked child.
    pub fn close_timeout(&self, grace: Duration) -> Result<(), Error> {
        self.engine.shut(Some(grace))
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker").field("engine", &self.engine).finish()
    }
}

//! The callers' side of a `Locker`: starts and ends its threads, posts requests, waits for answers.
//!
//! Every wait here has a deadline of its own, whatever the owner thread is doing; see
//! [`super::owner`] for the other side.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, never, select};

use crate::cancel::{CancelReason, CancellationToken};
use crate::clock::Clock;
use crate::error::{Error, Timeout};
use crate::event::Events;
use crate::key::Key;
use crate::lease::lease::{Held, Lease, LeaseGuard};
use crate::lease::mailbox::{Acquire, Answer, Mailbox, Reply, Request};
use crate::lease::options::Options;
use crate::lease::owner::{Owner, Setup};
use crate::lease::registry::{Registry, Slot};
use crate::lease::term::{self, Ended};
use crate::lease::watch::{self, SLICE, WatchList};
use crate::lease::watchdog;
use crate::session::connect::{Connector, SessionOptions};

/// Callers wait this much longer than a statement may take, so that they hear the owner's reason
/// rather than their own clock.
const GRACE: Duration = Duration::from_millis(50);

struct Threads {
    owner: JoinHandle<()>,
    watchdog: JoinHandle<()>,
    watch: Option<JoinHandle<()>>,
    events: JoinHandle<()>,
}

/// What the clones of a `Locker` share.
pub(crate) struct Engine {
    mailbox: Arc<Mailbox>,
    registry: Arc<Registry>,
    options: Options,
    events: Events,
    threads: Mutex<Option<Threads>>,
    next_id: AtomicU64,
    process: u32,
}

impl Engine {
    /// Starts the threads. Does not connect.
    pub(crate) fn start(
        connect: impl Fn(SessionOptions) -> Connector,
        options: Options,
    ) -> Result<Engine, Error> {
        options.validate()?;
        let (events, event_thread) = Events::start(options.on_event.clone())?;
        let (watchdog, watchdog_thread) = watchdog::start(events.clone())?;
        let (mailbox, requests, parked) = Mailbox::new();
        let mailbox = Arc::new(mailbox);
        let watch = options.watch.then(|| Arc::new(WatchList::default()));
        let watch_thread = match &watch {
            Some(list) => {
                let connector = connect(watch_session_options(&options));
                let (list, mailbox) = (Arc::clone(list), Arc::downgrade(&mailbox));
                Some(watch::start(list, connector, mailbox, &options, events.clone())?)
            }
            None => None,
        };
        let setup = Setup {
            options: options.clone(),
            connector: connect(session_options(&options)),
            clock: Clock::System,
            events: events.clone(),
            requests,
            parked,
            watchdog,
            watch: watch.clone(),
        };
        let owner = Builder::new()
            .name("leasehold-owner".into())
            .spawn(move || Owner::new(setup).run())
            .map_err(|error| Error::Spawn(Arc::new(error)))?;
        let threads =
            Threads { owner, watchdog: watchdog_thread, watch: watch_thread, events: event_thread };
        Ok(Engine {
            mailbox,
            registry: Arc::new(Registry::new()),
            options,
            events,
            threads: Mutex::new(Some(threads)),
            next_id: AtomicU64::new(0),
            process: std::process::id(),
        })
    }

    /// Closes; see `Locker::close` and `close_timeout`.
    pub(crate) fn shut(&self, grace: Option<Duration>) -> Result<(), Error> {
        self.not_forked()?;
        self.registry.close();
        self.mailbox.post(Request::StopGranting);
        if self.registry.on_job_thread() {
            // A job that waited for others could wait for one that waits for it.
            let mailbox = Arc::clone(&self.mailbox);
            self.registry.when_idle(move || mailbox.post(Request::ShutDown));
            return Ok(());
        }
        let deadline = grace.and_then(|grace| Instant::now().checked_add(grace));
        let running = self.registry.wait_for_jobs(deadline);
        if !running.is_empty() {
            let grace = grace.unwrap_or_default();
            return Err(Error::Timeout(Timeout::Close(grace, running.into())));
        }
        self.mailbox.post(Request::ShutDown);
        let threads = self.threads.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let Some(threads) = threads else { return Ok(()) };
        let end = Instant::now() + 2 * self.options.query_timeout;
        // An owner that is stuck in name resolution or on a Unix socket is left to end by itself.
        join_by(threads.owner, end);
        join_by(threads.watchdog, end);
        if let Some(watch) = threads.watch {
            join_by(watch, end);
        }
        self.events.stop(end);
        join_by(threads.events, end);
        Ok(())
    }

    fn not_forked(&self) -> Result<(), Error> {
        if std::process::id() == self.process { Ok(()) } else { Err(Error::Forked) }
    }

    pub(crate) fn key(&self, name: &str) -> Key {
        Key::new(self.options.namespace, name)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.registry.is_closing()
    }

    /// Takes a name into use.
    pub(crate) fn reserve(&self, name: &str, job: bool) -> Result<Slot, Error> {
        self.not_forked()?;
        self.registry.reserve(name, self.key(name), job)
    }

    /// The lease as a guard of the caller's.
    pub(crate) fn guard(&self, held: Held, slot: Slot) -> LeaseGuard {
        slot.set_token(&held.core.cancellation);
        LeaseGuard::new(held, slot, self.bound())
    }

    fn bound(&self) -> Duration {
        self.options.query_timeout + GRACE
    }

    /// Runs the job under the lease, and releases it.
    pub(crate) fn term<R, F>(&self, held: Held, slot: &Slot, job: F) -> Result<Ended<R>, Error>
    where
        F: FnOnce(&Lease) -> R + Send,
        R: Send,
    {
        term::run(held, slot, &self.events, self.bound(), job)
    }

    /// After stepping down: leaves the lease to others for as long as they may take to notice.
    pub(crate) fn cool_down(&self, cancel: &CancellationToken, slot: &Slot) {
        let pause = cancel.child_token();
        slot.set_token(&pause);
        let others = self.options.longest_retry() + GRACE;
        if pause.wait_timeout(others) {
            log::debug!(target: "leasehold", "cool-down of {:?} cut short", slot.name);
        }
    }

    /// Posts a question and waits for its answer.
    pub(crate) fn ask<T>(
        &self,
        request: impl FnOnce(Reply<T>, Instant) -> Request,
    ) -> Result<T, Error> {
        self.not_forked()?;
        if self.registry.is_closing() {
            return Err(Error::Closed);
        }
        let bound = self.bound();
        let (reply, answer) = bounded(1);
        self.mailbox.post(request(reply, Instant::now() + bound));
        match answer.recv_timeout(bound) {
            Ok(outcome) => outcome,
            Err(timeout) if timeout.is_timeout() => Err(Error::Timeout(Timeout::Session(bound))),
            Err(_) => Err(self.owner_gone()),
        }
    }

    /// Posts a wish for the lease.
    fn wish(&self, slot: &Slot, standing: bool, cancel: &CancellationToken) -> Wish {
        let (answer, answers) = bounded(2);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let trouble = Arc::new(Mutex::new(None));
        self.mailbox.post(Request::Acquire(Acquire {
            id,
            name: Arc::clone(&slot.name),
            key: slot.key,
            standing,
            cancel: cancel.clone(),
            mailbox: Arc::clone(&self.mailbox),
            answer,
            trouble: Arc::clone(&trouble),
        }));
        Wish { id, answers, trouble }
    }

    /// Asks for the lease once.
    pub(crate) fn try_once(
        &self,
        slot: &Slot,
        cancel: &CancellationToken,
    ) -> Result<Option<Held>, Error> {
        let bound = self.bound();
        let wish = self.wish(slot, false, cancel);
        match wish.answers.recv_timeout(bound) {
            Ok(Answer::Granted(held)) => Ok(Some(held)),
            Ok(Answer::Refused) => Ok(None),
            Ok(Answer::Failed(error)) => Err(error),
            Err(timeout) if timeout.is_timeout() => {
                self.withdraw(slot, &wish);
                Err(Error::Timeout(Timeout::Session(bound)))
            }
            Err(_) => Err(self.owner_gone()),
        }
    }

    /// Waits for the lease until it is granted, or there is a reason not to.
    pub(crate) fn contend(&self, cancel: &CancellationToken, slot: &Slot) -> Result<Held, Error> {
        self.wait_for(slot, cancel, None)?.ok_or(Error::Cancelled)
    }

    /// Waits for the lease for at most `timeout`, or until `cancel` is set.
    pub(crate) fn wait_for(
        &self,
        slot: &Slot,
        cancel: &CancellationToken,
        timeout: Option<Duration>,
    ) -> Result<Option<Held>, Error> {
        // Set also by a close, which must not depend on the owner's getting to its queue.
        let wait = cancel.child_token();
        slot.set_token(&wait);
        let stopped_by = || match wait.reason() {
            Some(CancelReason::Closed) => Error::Closed,
            _ => Error::Cancelled,
        };
        if wait.is_cancelled() {
            return Err(stopped_by());
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (stop, stopped) = bounded(1);
        // A full channel has the news already.
        let _subscription = wait.subscribe(move || stop.try_send(()).unwrap_or_default());
        let wish = self.wish(slot, true, cancel);
        let late = deadline.map_or(never(), crossbeam_channel::at);
        let mut refused = false;
        let outcome = loop {
            select! {
                recv(wish.answers) -> answer => match answer {
                    Ok(Answer::Granted(held)) => return Ok(Some(held)),
                    Ok(Answer::Failed(error)) => return Err(error),
                    Ok(Answer::Refused) => refused = true,
                    Err(_) => return Err(self.owner_gone()),
                },
                recv(stopped) -> _ => break Err(stopped_by()),
                recv(late) -> _ => break match wish.trouble() {
                    Some(error) => Err(error),
                    None if refused => Ok(None),
                    None => Err(Error::Timeout(Timeout::Session(timeout.unwrap_or_default()))),
                },
            }
        };
        self.withdraw(slot, &wish);
        outcome
    }

    /// Takes a wish back. A grant that crosses with it is released by its drop.
    fn withdraw(&self, slot: &Slot, wish: &Wish) {
        self.mailbox.post(Request::Withdraw { key: slot.key, id: wish.id });
    }

    /// Why the owner dropped a request without a word.
    fn owner_gone(&self) -> Error {
        if self.registry.is_closing() { Error::Closed } else { Error::Panicked }
    }
}

/// A wish that was posted.
struct Wish {
    id: u64,
    answers: Receiver<Answer>,
    trouble: Arc<Mutex<Option<Error>>>,
}

impl Wish {
    fn trouble(&self) -> Option<Error> {
        self.trouble.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

/// What a lease's session is opened with.
fn session_options(options: &Options) -> SessionOptions {
    let window = options.window();
    SessionOptions {
        query_timeout: options.query_timeout,
        idle_timeout: options.standby_ttl(),
        vanished_after: options.ttl().unwrap_or(window + window / 10),
        application_name: options.application_name.clone(),
        lock_timeout: None,
        listen: true,
    }
}

/// What the session of the watching thread is opened with.
fn watch_session_options(options: &Options) -> SessionOptions {
    SessionOptions { lock_timeout: Some(SLICE), listen: false, ..session_options(options) }
}

/// Joins a thread if it ends by then. The thread itself is not waited for by itself.
fn join_by(handle: JoinHandle<()>, end: Instant) {
    if handle.thread().id() == thread::current().id() {
        return;
    }
    let step = Duration::from_millis(1);
    while !handle.is_finished() {
        if Instant::now() >= end {
            let name = handle.thread().name().unwrap_or_default().to_owned();
            log::warn!(target: "leasehold", "thread {name} is stuck and left behind");
            return;
        }
        thread::sleep(step);
    }
    if handle.join().is_err() {
        log::error!(target: "leasehold", "a thread of the library panicked");
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("options", &self.options).finish_non_exhaustive()
    }
}

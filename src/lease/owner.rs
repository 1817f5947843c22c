//! The thread that owns the session: the only one that talks to the server.
//!
//! It takes requests in batches, so that whatever waits shares a round trip, and between them parks
//! on the session's socket, where it notices within milliseconds what the server sends: the release
//! of a lease that it waits for, or the end of the session. What it serves is in [`super::serve`].
//!
//! Nobody waits for this thread without a deadline of their own: it may be held up for the query
//! time-out by a server that does not answer, and longer by name resolution.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};

use crate::backoff::{Backoff, jittered};
use crate::clock::Clock;
use crate::error::{Error, LostReason};
use crate::event::Events;
use crate::key::Key;
use crate::lease::fence::Fenced;
use crate::lease::heartbeat::AwaitedAnswer;
use crate::lease::life::Life;
use crate::lease::mailbox::{Acquire, Answer, Parked, Reply, Request, parked};
use crate::lease::options::Options;
use crate::lease::release::Release;
use crate::lease::watch::WatchList;
use crate::session::connect::Connector;
use crate::session::{HolderRow, Session};

/// The wait before the first new attempt to connect.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
/// Over a Unix socket nothing can wake a parked thread, so it looks at the socket this often.
const UNIX_SLICE: Duration = Duration::from_millis(20);
/// The wait before a heartbeat that the server answered with an error is repeated.
const HEARTBEAT_AGAIN: Duration = Duration::from_millis(200);
/// After a release several standbys hear of it at once; each adds up to this much.
const SPREAD: Duration = Duration::from_millis(2);
/// How long the thread stays awake after a request. Falling asleep and being woken again costs about
/// as much, and a caller that asks again and again waits for it each time.
const LINGER: Duration = Duration::from_micros(50);
/// There is always a heartbeat due before.
const LONGEST_PARK: Duration = Duration::from_secs(24 * 3600);

/// A session and its life.
pub(crate) struct Live {
    pub(crate) session: Session,
    pub(crate) life: Arc<Life>,
    /// The server's idle limit with leases and without, in its unit; `None` if it stays as it is.
    pub(crate) idle: Option<(String, String)>,
}

/// A standing wish.
pub(crate) struct Waiting {
    pub(crate) acquire: Acquire,
    /// Tried then at the latest.
    pub(crate) due: Option<Instant>,
    /// Has heard that the lease is held elsewhere.
    pub(crate) told: bool,
}

/// Requests that are to be served with the next statements.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) releases: Vec<Release>,
    pub(crate) tries: Vec<Acquire>,
    pub(crate) pings: Vec<(Reply<()>, Instant)>,
    pub(crate) holders: Vec<(Key, Reply<Option<HolderRow>>, Instant)>,
    pub(crate) step_downs: Vec<(Key, Reply<bool>)>,
    /// Nonces of requests to step down that a lease of ours has heard.
    pub(crate) heard_step_downs: Vec<String>,
}

impl Inbox {
    fn needs_session(&self) -> bool {
        !(self.tries.is_empty()
            && self.pings.is_empty()
            && self.holders.is_empty()
            && self.step_downs.is_empty())
    }
}

/// What the owner is started with.
pub(crate) struct Setup {
    pub(crate) options: Options,
    pub(crate) connector: Connector,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) requests: Receiver<Request>,
    pub(crate) parked: Arc<Parked>,
    pub(crate) watchdog: Sender<Arc<Life>>,
    pub(crate) watch: Option<Arc<WatchList>>,
}

pub(crate) struct Owner {
    pub(crate) setup: Setup,
    pub(crate) live: Option<Live>,
    pub(crate) inbox: Inbox,
    pub(crate) waiting: HashMap<Key, Waiting>,
    /// Granted leases whose fence is busy, and when to look at it again.
    pub(crate) fenced: Vec<Fenced>,
    pub(crate) fences_at: Instant,
    pub(crate) awaited: Vec<AwaitedAnswer>,
    rng: fastrand::Rng,
    pub(crate) backoff: Backoff,
    /// No attempt to connect for standing wishes before.
    pub(crate) connect_at: Option<Instant>,
    /// When everything that waits is tried again.
    pub(crate) retry_at: Instant,
    /// No heartbeat before, because the last one failed.
    heartbeat_not_before: Option<Instant>,
    /// A request came since the last wait.
    asked: bool,
    granting: bool,
    running: bool,
}

impl Owner {
    pub(crate) fn new(setup: Setup) -> Owner {
        let rng = fastrand::Rng::new();
        let backoff = Backoff::new(FIRST_BACKOFF, setup.options.retry_interval, rng.clone());
        Owner {
            setup,
            live: None,
            inbox: Inbox::default(),
            waiting: HashMap::new(),
            fenced: Vec::new(),
            fences_at: Instant::now(),
            awaited: Vec::new(),
            rng,
            backoff,
            connect_at: None,
            retry_at: Instant::now(),
            heartbeat_not_before: None,
            asked: false,
            granting: true,
            running: true,
        }
    }

    /// The thread's body.
    ///
    /// A panic in it, of ours or of the TLS library under the session, must not leave jobs at work
    /// that nobody watches: they are told that their leases are lost, and callers hear
    /// [`Error::Panicked`].
    pub(crate) fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.work()));
        if let Err(panic) = outcome {
            self.lose(LostReason::InDoubt, Some(Error::Panicked));
            self.fail_wishes(&Error::Panicked);
            if let Some(watch) = &self.setup.watch {
                watch.stop();
            }
            resume_unwind(panic);
        }
    }

    fn work(&mut self) {
        while self.running {
            self.wait();
            self.collect();
            self.serve();
        }
        if let Some(watch) = &self.setup.watch {
            watch.stop();
        }
        self.release_everything();
        if let Some(live) = self.live.take() {
            live.life.close();
            live.session.close();
        }
    }

    fn collect(&mut self) {
        loop {
            match self.setup.requests.try_recv() {
                Ok(request) => self.accept(request),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.running = false;
                    return;
                }
            }
        }
    }

    fn accept(&mut self, request: Request) {
        self.asked = true;
        match request {
            Request::Acquire(acquire) if !self.granting => {
                self.answer(&acquire, Answer::Failed(Error::Closed));
            }
            Request::Acquire(acquire) if acquire.standing => {
                let due = Some(Instant::now());
                self.waiting.insert(acquire.key, Waiting { acquire, due, told: false });
            }
            Request::Acquire(acquire) => self.inbox.tries.push(acquire),
            Request::Withdraw { key, id } => {
                if self.waiting.get(&key).is_some_and(|waiting| waiting.acquire.id == id) {
                    self.waiting.remove(&key);
                }
                self.inbox.tries.retain(|acquire| acquire.id != id);
                let withdrawn = self.fenced.iter().position(|term| term.acquire.id == id);
                if let Some(at) = withdrawn {
                    let core = self.fenced.swap_remove(at).core;
                    self.give_back(core);
                }
            }
            Request::Release { core, reply } => self.inbox.releases.push(Release { core, reply }),
            Request::Ping { reply, expires } => self.inbox.pings.push((reply, expires)),
            Request::Holder { key, reply, expires } => {
                self.inbox.holders.push((key, reply, expires));
            }
            Request::StepDown { key, reply } => self.inbox.step_downs.push((key, reply)),
            Request::Free(keys) => {
                for key in keys {
                    self.try_soon(Key::from_i64(key));
                }
            }
            Request::StopGranting => {
                self.granting = false;
                self.fail_wishes(&Error::Closed);
                for Fenced { acquire, core, .. } in std::mem::take(&mut self.fenced) {
                    self.answer(&acquire, Answer::Failed(Error::Closed));
                    self.give_back(core);
                }
            }
            Request::ShutDown => self.running = false,
        }
    }

    /// Answers, for the last time, every wish that is not granted.
    pub(crate) fn fail_wishes(&mut self, error: &Error) {
        let waiting = self.waiting.drain().map(|(_, waiting)| waiting.acquire);
        for acquire in std::mem::take(&mut self.inbox.tries).into_iter().chain(waiting) {
            if acquire.answer.try_send(Answer::Failed(error.clone())).is_err() {
                log::trace!(target: "leasehold", "a caller went away: {}", acquire.key);
            }
        }
    }

    pub(crate) fn answer(&self, acquire: &Acquire, answer: Answer) {
        // A caller that went away needs no answer; a lease in it is released by its drop.
        if acquire.answer.try_send(answer).is_err() {
            log::trace!(target: "leasehold", "a caller went away: {}", acquire.key);
        }
    }

    fn serve(&mut self) {
        // The watchdog, or a job, may have seen the deadline pass; or nobody yet, after a pause of
        // the whole process.
        let over = |live: &Live| live.life.end_if_passed() || live.life.ended().is_some();
        if self.live.as_ref().is_some_and(over) {
            self.lose(LostReason::NoAnswer, None);
        }
        self.serve_releases();
        let asked = self.inbox.needs_session();
        if !asked && self.waiting.is_empty() && self.live.is_none() {
            return;
        }
        if self.ensure_session(asked) {
            self.serve_tries();
            self.serve_fences();
            self.serve_questions();
            self.serve_step_downs();
            self.serve_heartbeat();
        }
        self.tell_watch();
    }

    pub(crate) fn reply<T>(&self, reply: &Reply<T>, result: Result<T, Error>) {
        if reply.try_send(result).is_err() {
            log::trace!(target: "leasehold", "a caller went away");
        }
    }

    /// Tells the watching thread what is waited for.
    fn tell_watch(&self) {
        if let Some(watch) = &self.setup.watch {
            let told = self.waiting.iter().filter(|(_, waiting)| waiting.told);
            watch.set(told.map(|(key, _)| key.as_i64()).collect());
        }
    }

    /// When the next statement is due without a request.
    fn next_due(&self) -> Option<Instant> {
        let now = Instant::now();
        let waiting = || {
            let soonest = self.waiting.values().filter_map(|waiting| waiting.due).min();
            soonest.map_or(self.retry_at, |due| due.min(self.retry_at))
        };
        let wish = (!self.waiting.is_empty()).then(waiting);
        match &self.live {
            None => wish.map(|_| self.connect_at.unwrap_or(now)),
            Some(_) => {
                let awaited = self.awaited.iter().map(|each| each.expires).min();
                let others = [wish, self.fences_due(), awaited];
                others.into_iter().flatten().chain([self.heartbeat_due(now)]).min()
            }
        }
    }

    /// A holder proves its leases once per heartbeat interval; a session without leases is kept
    /// alive once per retry interval.
    fn heartbeat_due(&self, now: Instant) -> Instant {
        let Some(live) = &self.live else { return now };
        let options = &self.setup.options;
        let interval = match live.life.lease_count() {
            0 => options.longest_retry(),
            _ => options.heartbeat_interval,
        };
        let silent = live.life.clock.now().since(live.life.last_good());
        let due = now + interval.saturating_sub(silent);
        self.heartbeat_not_before.map_or(due, |at| due.max(at))
    }

    pub(crate) fn heartbeat_is_due(&self) -> bool {
        let now = Instant::now();
        self.live.is_some() && self.heartbeat_due(now) <= now
    }

    pub(crate) fn heartbeat_answered(&mut self, again: bool) {
        self.heartbeat_not_before = again.then(|| Instant::now() + HEARTBEAT_AGAIN);
    }

    pub(crate) fn retry_is_due(&self) -> bool {
        Instant::now() >= self.retry_at
    }

    pub(crate) fn schedule_retry(&mut self) {
        self.retry_at = Instant::now() + jittered(&mut self.rng, self.setup.options.retry_interval);
    }

    /// When to try for a lease whose release was just told.
    pub(crate) fn spread(&mut self) -> Instant {
        let micros = u64::try_from(SPREAD.as_micros()).unwrap_or(0);
        Instant::now() + Duration::from_micros(self.rng.u64(0..=micros))
    }

    /// Waits for a request, for the server, or for the next thing due.
    fn wait(&mut self) {
        if self.linger() {
            return;
        }
        let due = self.next_due();
        let limit = due.map(|due| due.saturating_duration_since(Instant::now()));
        if limit == Some(Duration::ZERO) || !self.setup.requests.is_empty() {
            return;
        }
        match self.live.as_ref().map(|live| live.session.guard().cloned()) {
            None => self.wait_for_request(limit),
            Some(None) => {
                self.wait_for_request(Some(limit.map_or(UNIX_SLICE, |d| d.min(UNIX_SLICE))));
                self.listen(Duration::from_millis(1));
            }
            Some(Some(guard)) => {
                *parked(&self.setup.parked) = Some(Arc::clone(&guard));
                // The last look at the queue: see `mailbox`.
                match self.setup.requests.try_recv() {
                    Ok(request) => self.accept(request),
                    Err(TryRecvError::Disconnected) => self.running = false,
                    Err(TryRecvError::Empty) => self.listen(limit.unwrap_or(LONGEST_PARK)),
                }
                *parked(&self.setup.parked) = None;
                guard.unwake();
            }
        }
    }

    /// After a request the next one often follows at once: waits for it awake, for a moment. True if
    /// it came.
    fn linger(&mut self) -> bool {
        if !std::mem::take(&mut self.asked) {
            return false;
        }
        let end = Instant::now() + LINGER;
        while self.setup.requests.is_empty() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    fn wait_for_request(&mut self, limit: Option<Duration>) {
        let received = match limit {
            Some(limit) => self.setup.requests.recv_timeout(limit),
            None => self.setup.requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(request) => self.accept(request),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.running = false,
        }
    }
}

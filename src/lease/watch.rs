//! The thread that notices the end of a holder's session, over a session of its own.
//!
//! Each session holds a beacon, a lock that no other session takes. While something is waited for,
//! this thread waits in the server for the beacon of the holder's session, in shared mode: it is
//! granted when that session ends, however it ends. The owner thread is then told to try.
//!
//! A session that waits for a lock has a snapshot, which holds back vacuum and concurrent index
//! builds. So it waits in slices: each ends with the server's `lock_timeout`, after which the lock
//! may be held all the same, and is given back. With the sessions of several holders to watch, slices
//! go round. Holders without a beacon are not of this library: `pg_locks` is looked at once a slice.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::event::{Event, Events};
use crate::lease::mailbox::{Mailbox, Request};
use crate::lease::options::Options;
use crate::session::Session;
use crate::session::connect::Connector;

/// How long one wait in the server lasts, and so the oldest snapshot.
pub(crate) const SLICE: Duration = Duration::from_millis(400);
/// How long the session is kept when nothing is waited for any more.
const LINGER: Duration = Duration::from_secs(5);
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct State {
    keys: Vec<i64>,
    /// Counts changes of `keys`, and tries that failed: the holders may be others now.
    version: u64,
    stop: bool,
}

/// What is waited for, as the owner thread tells it.
#[derive(Debug, Default)]
pub(crate) struct WatchList {
    state: Mutex<State>,
    changed: Condvar,
}

impl WatchList {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Replaces what is waited for.
    pub(crate) fn set(&self, mut keys: Vec<i64>) {
        keys.sort_unstable();
        let mut state = self.lock();
        if state.keys != keys {
            state.keys = keys;
            state.version += 1;
            self.changed.notify_all();
        }
    }

    /// A try failed: somebody holds what was waited for, maybe somebody else.
    pub(crate) fn refused(&self) {
        self.lock().version += 1;
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to watch; `None` to stop, or after `limit`.
    fn wait(&self, limit: Option<Duration>) -> Option<(Vec<i64>, u64)> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            if !state.keys.is_empty() {
                return Some((state.keys.clone(), state.version));
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            state = self.pause(state, left.unwrap_or(LINGER));
        }
    }

    fn pause<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        match self.changed.wait_timeout(state, time) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Sleeps for `time`, less if the list changes.
    fn sleep(&self, time: Duration) {
        let state = self.lock();
        if !state.stop {
            drop(self.pause(state, time));
        }
    }

    fn stopped(&self) -> bool {
        self.lock().stop
    }
}

struct Watcher {
    list: Arc<WatchList>,
    connector: Connector,
    mailbox: Weak<Mailbox>,
    events: Events,
}

/// Starts the thread. It ends by [`WatchList::stop`].
pub(crate) fn start(
    list: Arc<WatchList>,
    connector: Connector,
    mailbox: Weak<Mailbox>,
    options: &Options,
    events: Events,
) -> Result<JoinHandle<()>, Error> {
    let mut backoff = Backoff::new(FIRST_BACKOFF, options.retry_interval, fastrand::Rng::new());
    let watcher = Watcher { list, connector, mailbox, events };
    Builder::new()
        .name("leasehold-watch".into())
        .spawn(move || {
            while !watcher.list.stopped() {
                if watcher.list.wait(None).is_none() {
                    continue;
                }
                // An outage is the owner's to report; here it only means to try again.
                let outcome = watcher.connector.open().and_then(|(session, _)| {
                    backoff.reset();
                    watcher.watch(session)
                });
                if let Err(error) = outcome {
                    let retry_in = backoff.next();
                    watcher.events.send(Event::WatchFailed { error, retry_in });
                    watcher.list.sleep(retry_in);
                }
            }
        })
        .map_err(|error| Error::Spawn(Arc::new(error)))
}

impl Watcher {
    /// Watches until nothing is waited for, or the session fails.
    fn watch(&self, mut session: Session) -> Result<(), Error> {
        let outcome = self.rounds(&mut session);
        if session.is_broken() {
            session.abandon()
        } else {
            session.close()
        }
        outcome
    }

    fn rounds(&self, session: &mut Session) -> Result<(), Error> {
        let mut known = None;
        let mut holders = HashMap::<Option<i32>, Vec<i64>>::new();
        let mut turn = 0;
        while let Some((keys, version)) = self.list.wait(Some(LINGER)) {
            if known != Some(version) || holders.contains_key(&None) {
                holders = self.resolve(session, &keys)?;
                known = Some(version);
            }
            let beacons: Vec<i32> = holders.keys().copied().flatten().collect();
            let Some(beacon) = beacons.get(turn % beacons.len().max(1)) else {
                self.list.sleep(SLICE);
                continue;
            };
            turn += 1;
            if session.watch(*beacon)? {
                let free = holders.remove(&Some(*beacon)).unwrap_or_default();
                self.tell(free);
            }
        }
        Ok(())
    }

    /// Finds out whose sessions hold `keys`: keys by beacon. Tells at once of those that nobody holds.
    fn resolve(
        &self,
        session: &mut Session,
        keys: &[i64],
    ) -> Result<HashMap<Option<i32>, Vec<i64>>, Error> {
        let mut holders = HashMap::<Option<i32>, Vec<i64>>::new();
        let held = session.holders(keys)?;
        let free = keys.iter().filter(|key| held.iter().all(|(held, ..)| held != *key));
        self.tell(free.copied().collect());
        for (key, _pid, beacon) in held {
            holders.entry(beacon).or_default().push(key);
        }
        Ok(holders)
    }

    fn tell(&self, keys: Vec<i64>) {
        if let (false, Some(mailbox)) = (keys.is_empty(), self.mailbox.upgrade()) {
            mailbox.post(Request::Free(keys));
        }
    }
}

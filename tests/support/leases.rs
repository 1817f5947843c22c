//! Lockers and their events, as tests want them.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold::{Event, Locker, Options};

use super::Server;

/// The lease that most tests contend for.
pub const NAME: &str = "job";

/// How long a test waits for what must happen, before it fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Options that make tests short: 200 ms between tries and between heartbeats, 1 s for a statement.
pub fn fast() -> Options {
    Options::new()
        .retry_interval(Duration::from_millis(200))
        .heartbeat_interval(Duration::from_millis(200))
        .query_timeout(Duration::from_secs(1))
}

/// A locker on `server`.
pub fn locker(server: &Server, options: Options) -> Locker {
    Locker::new(server.config(), options).unwrap()
}

/// Runs `f` on a thread of its own.
pub fn in_thread<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(f)
}

type Log = Mutex<Vec<(Instant, Event)>>;

/// Keeps the events of a locker, with the time at which each arrived.
#[derive(Clone, Default)]
pub struct Recorder {
    inner: Arc<(Log, Condvar)>,
}

impl Recorder {
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// `options`, with events going to this recorder.
    pub fn attach(&self, options: Options) -> Options {
        let inner = Arc::clone(&self.inner);
        options.on_event(move |event| {
            inner
                .0
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .push((Instant::now(), event.clone()));
            inner.1.notify_all();
        })
    }

    pub fn events(&self) -> Vec<Event> {
        self.inner.0.lock().unwrap().iter().map(|(_, event)| event.clone()).collect()
    }

    pub fn count(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.inner.0.lock().unwrap().iter().filter(|(_, event)| wanted(event)).count()
    }

    /// The first event that is wanted; waits for it.
    pub fn wait_for(&self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        self.wait_for_nth(what, 1, wanted).1
    }

    /// The `n`th event that is wanted, and when it arrived; waits for it.
    pub fn wait_for_nth(
        &self,
        what: &str,
        n: usize,
        wanted: impl Fn(&Event) -> bool,
    ) -> (Instant, Event) {
        let deadline = Instant::now() + PATIENCE;
        let mut events = self.inner.0.lock().unwrap();
        loop {
            if let Some(found) = events.iter().filter(|(_, event)| wanted(event)).nth(n - 1) {
                return found.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let seen = events.iter().map(|(_, event)| event.to_string()).collect::<Vec<_>>();
            assert!(!left.is_zero(), "no event: {what}; seen:\n{}", seen.join("\n"));
            events = self.inner.1.wait_timeout(events, left).unwrap().0;
        }
    }
}

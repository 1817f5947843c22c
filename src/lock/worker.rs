//! Threads of the library for what may block: the driver and the pool panic on a thread that is
//! inside a tokio runtime, and destructors must not wait.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded, never, select};

use crate::error::{Error, Timeout};

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The next job; `None` when the thread should end.
    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            let waited = self.changed.wait_timeout(state, LINGER);
            let (next, late) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            state = next;
            state.idle -= 1;
            if late.timed_out() && state.jobs.is_empty() {
                return None;
            }
        }
    }
}

/// As many threads as there is work for at once, named `leasehold-lock`; each ends after 5 s
/// without work.
#[derive(Default)]
pub(crate) struct Workers {
    queue: Arc<Queue>,
}

/// True on a thread on which the driver would panic, or might.
pub(crate) fn inside_runtime() -> bool {
    tokio::runtime::Handle::try_current().is_ok()
}

impl Workers {
    /// Runs `job` on a thread of ours. Does not block; gives the job back if there is no thread for
    /// it and none can be started.
    pub(crate) fn spawn(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut state = self.queue.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            drop(state);
            self.queue.changed.notify_one();
            return Ok(());
        }
        drop(state);
        let queue = Arc::clone(&self.queue);
        let thread = thread::Builder::new().name("leasehold-lock".into()).spawn(move || {
            while let Some(job) = queue.next() {
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    log::error!(target: "leasehold", "a job of module lock panicked");
                }
            }
        });
        match thread {
            Ok(_) => Ok(()),
            Err(error) => {
                // Ours is the last one, or another thread has taken it in the meantime.
                let refused = self.queue.lock().jobs.pop_back();
                if let Some(refused) = refused {
                    std::mem::forget(refused);
                    return Err(Error::Spawn(Arc::new(error)));
                }
                Ok(())
            }
        }
    }

    /// Runs `job` on a thread of ours and waits for its result for at most `bound`, or `grace`
    /// after `stop` has a message. A result that comes too late is dropped there.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        bound: Option<Duration>,
        stop: Option<(&Receiver<()>, Duration)>,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (reply, result) = bounded(1);
        self.spawn(move || {
            // A caller that went away: the result's drop cleans up.
            drop(reply.send(job()));
        })?;
        let late = bound.map_or(never(), crossbeam_channel::after);
        let gone =
            || Error::Spawn(Arc::new(std::io::Error::other("a job of module lock panicked")));
        let nothing = never();
        let (stopped, grace) = stop.unwrap_or((&nothing, Duration::ZERO));
        select! {
            recv(result) -> result => result.map_err(|_| gone()),
            recv(late) -> _ => Err(Error::Timeout(Timeout::Session(bound.unwrap_or_default()))),
            recv(stopped) -> _ => match result.recv_timeout(grace) {
                Ok(result) => Ok(result),
                Err(_) => Err(Error::Timeout(Timeout::Session(grace))),
            },
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("idle", &self.queue.lock().idle).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    #[test]
    fn jobs_that_block_do_not_hold_up_others() {
        let workers = Workers::default();
        let together = Arc::new(Barrier::new(9));
        for _ in 0..8 {
            let together = Arc::clone(&together);
            workers.spawn(move || _ = together.wait()).unwrap();
        }
        together.wait();
    }

    #[test]
    fn a_thread_is_used_again() {
        let workers = Workers::default();
        let id = || workers.call(None, None, || thread::current().id()).unwrap();
        let first = id();
        while workers.queue.lock().idle == 0 {
            thread::yield_now();
        }
        assert_eq!(id(), first);
    }

    #[test]
    fn a_call_ends_at_its_bound_and_its_late_result_is_dropped() {
        struct Tell(std::sync::mpsc::Sender<()>);
        impl Drop for Tell {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
            }
        }
        let workers = Workers::default();
        let (tell, told) = channel();
        let (go, gate) = channel::<()>();
        let result = workers.call(Some(Duration::from_millis(20)), None, move || {
            gate.recv().unwrap();
            Tell(tell)
        });
        assert!(matches!(result.map(drop), Err(Error::Timeout(Timeout::Session(_)))));
        go.send(()).unwrap();
        told.recv_timeout(Duration::from_secs(30)).unwrap();
    }

    #[test]
    fn a_panic_is_an_error_of_its_own_call_only() {
        let workers = Workers::default();
        let panicked: Result<(), Error> = workers.call(None, None, || panic!("part of the test"));
        assert!(matches!(panicked, Err(Error::Spawn(_))));
        assert_eq!(workers.call(None, None, || 7).unwrap(), 7);
    }
}

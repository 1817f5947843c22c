//! One term: the job on its worker thread, supervised from the caller's.
//!
//! # Panics
//!
//! A job's panic ends the worker, the lease is released as if the job had returned, and then the
//! panic goes on in the caller's thread with its payload.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{Builder, scope};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded, select};

use crate::cancel::CancelReason;
use crate::error::{Error, LostReason};
use crate::event::{Event, Events};
use crate::lease::lease::{Core, Held, Lease};
use crate::lease::registry::Slot;

/// A job that outlives its lease is reported this often.
const OVERRUN: Duration = Duration::from_secs(1);

/// How a term ended.
pub(crate) struct Ended<R> {
    pub(crate) value: R,
    /// Why the lease was lost before the job returned, if it was.
    pub(crate) lost: Option<LostReason>,
    /// Why the job had been told to stop, if it had.
    pub(crate) told: Option<CancelReason>,
}

/// Runs `job` on a worker thread while the caller's watches; then releases. The unlock is sent
/// after the job has returned, never before.
pub(crate) fn run<R, F>(
    held: Held,
    slot: &Slot,
    events: &Events,
    release_bound: Duration,
    job: F,
) -> Result<Ended<R>, Error>
where
    F: FnOnce(&Lease) -> R + Send,
    R: Send,
{
    let core = Arc::clone(&held.core);
    slot.set_token(&core.cancellation);
    let lease = Lease { core: Arc::clone(&core) };
    let outcome = scope(|scope| {
        let (returned, done) = bounded::<()>(0);
        let worker = Builder::new()
            .name("leasehold-job".into())
            .spawn_scoped(scope, move || {
                // Dropped last, also by a panic: tells the supervisor.
                let _returned = returned;
                slot.enter_job();
                job(&lease)
            })
            .map_err(|error| Error::Spawn(Arc::new(error)))?;
        supervise(&core, events, &done);
        Ok(worker.join())
    });
    slot.leave_job();
    // From here the lease is not held any more, whatever the clock and the server do.
    let kept = core.begin_release();
    let told = core.cancellation.reason();
    let lost = (!kept).then(|| core.life.ended().unwrap_or(LostReason::NoAnswer));
    if kept {
        if let Err(error) = held.confirm(release_bound) {
            // The session ends, and the lock with it; the owner tells, unless it is stuck.
            log::warn!(target: "leasehold", "release of {:?}: {}", core.name, error.chain());
        }
    }
    match outcome? {
        Ok(value) => Ok(Ended { value, lost, told }),
        Err(panic) => resume_unwind(panic),
    }
}

/// Waits until the job has returned; reports what it does after it was told to stop.
fn supervise(core: &Arc<Core>, events: &Events, done: &Receiver<()>) {
    let (stop, stopped) = bounded(1);
    let _subscription = core.cancellation.subscribe(move || {
        // Full means that it was told already.
        stop.try_send(()).unwrap_or_default();
    });
    let returned = select! {
        recv(done) -> _ => true,
        recv(stopped) -> _ => false,
    };
    if let Some(reason) = core.cancellation.reason() {
        events.send(Event::Stopping { name: Arc::clone(&core.name), key: core.key, reason });
    }
    if returned {
        return;
    }
    let mut lost_at: Option<Instant> = None;
    loop {
        if core.was_lost() {
            lost_at.get_or_insert_with(Instant::now);
        }
        match done.recv_timeout(OVERRUN) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return,
        }
        if let Some(noticed) = lost_at {
            events.send(Event::Overrun {
                name: Arc::clone(&core.name),
                key: core.key,
                token: core.token,
                since: noticed.elapsed(),
            });
        }
    }
}

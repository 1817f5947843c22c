//! Giving leases back.
//!
//! The unlock is confirmed by the server, or the session is closed: a lock that may still be held by
//! a session in use would be nobody's.

use std::sync::Arc;

use crate::error::{Error, LostReason};
use crate::event::Event;
use crate::lease::lease::Core;
use crate::lease::mailbox::Reply;
use crate::lease::owner::Owner;

/// A lease to give back.
pub(crate) struct Release {
    pub(crate) core: Arc<Core>,
    pub(crate) reply: Option<Reply<()>>,
}

impl Owner {
    /// Unlocks what was given back, in one statement.
    pub(crate) fn serve_releases(&mut self) {
        let (mine, stale): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inbox.releases).into_iter().partition(|release| {
                let live = self.live.as_ref();
                live.is_some_and(|live| Arc::ptr_eq(&live.life, &release.core.life))
            });
        // A lease of an earlier session is gone with it: nothing of the present one is touched.
        for release in stale {
            let lost = release.core.life.ended().unwrap_or(LostReason::SessionEnded);
            self.released(release, Err(Error::Lost(lost)));
        }
        if !mine.is_empty() {
            self.unlock(mine);
        }
    }

    fn unlock(&mut self, releases: Vec<Release>) {
        let Some(live) = &mut self.live else { return };
        let keys: Vec<i64> = releases.iter().map(|release| release.core.key.as_i64()).collect();
        let last = live.life.lease_count() <= keys.len();
        let idle = live.idle.as_ref().filter(|_| last).map(|(_, idle)| idle.as_str());
        let start = live.life.clock.now();
        let outcome = live.session.unlock(&keys, idle);
        let doubtful = match outcome {
            Ok(missing) => Ok(missing),
            Err(error) if live.session.is_broken() => Err(error),
            // The unlock may have happened and only the notification failed: look.
            Err(error) => live.session.ask(&keys).and_then(|still| {
                self.setup.events.send(Event::TryFailed { error });
                live.session.unlock_quietly(&still)
            }),
        };
        match doubtful {
            Ok(missing) => {
                self.answered(start);
                let in_doubt = !missing.is_empty();
                for release in releases {
                    let held = !missing.contains(&release.core.key.as_i64());
                    self.released(release, if held { Ok(()) } else { Err(Error::NotHeld) });
                }
                if in_doubt {
                    self.lose(LostReason::InDoubt, None);
                }
            }
            Err(error) => {
                for release in releases {
                    self.released(release, Err(error.clone()));
                }
                self.lose(LostReason::InDoubt, Some(error));
            }
        }
    }

    /// Gives a lease back that nobody took.
    pub(crate) fn give_back(&mut self, core: Arc<Core>) {
        if core.begin_release() {
            self.inbox.releases.push(Release { core, reply: None });
        }
    }

    /// Ends a lease's release: `Ok` if the server confirmed it.
    pub(crate) fn released(&mut self, release: Release, outcome: Result<(), Error>) {
        let Release { core, reply } = release;
        let (name, key, pid) = (Arc::clone(&core.name), core.key, core.life.pid());
        let event = match &outcome {
            Ok(()) => Event::Released { name, key, pid, token: core.token },
            Err(Error::NotHeld) => Event::ReleaseFailed { name, key, pid, error: None },
            Err(error) => Event::ReleaseFailed { name, key, pid, error: Some(error.clone()) },
        };
        core.ended();
        core.life.remove(&core);
        // Whoever waits for it here was not tried while the session held it.
        self.try_soon(key);
        self.setup.events.send(event);
        if let Some(reply) = reply {
            self.reply(&reply, outcome);
        }
    }

    /// At the end: gives back what guards still hold.
    pub(crate) fn release_everything(&mut self) {
        self.serve_releases();
        let Some(live) = &self.live else { return };
        let releases: Vec<Release> = live
            .life
            .leases()
            .into_iter()
            .filter(|core| core.begin_release())
            .map(|core| Release { core, reply: None })
            .collect();
        if !releases.is_empty() {
            self.unlock(releases);
        }
    }
}

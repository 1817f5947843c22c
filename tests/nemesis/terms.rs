//! What the checker decides from: terms, put together from records, and faults, with their times.

use std::collections::HashMap;

use crate::record::{Kind, Record};

pub const FOREVER: u64 = u64::MAX;

/// What can go wrong.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// `kill -9` of a replica, and a new one in its place.
    Kill,
    /// SIGSTOP of a replica, then SIGCONT.
    Pause,
    /// `pg_terminate_backend` of a holder's session.
    Terminate,
    /// SIGSTOP of a holder's backend, then SIGCONT.
    FreezeBackend,
    /// SIGSTOP of the whole server, then SIGCONT.
    FreezeServer,
    /// Fast stop of the server, then a start.
    StopServer,
    /// Immediate stop, then a start with recovery.
    AbortServer,
    /// `kill -9` of the postmaster and all its children, then a start.
    CrashServer,
    /// A replica's proxy forwards nothing, and keeps connections open.
    Stall,
    /// A replica's connections are reset.
    Reset,
    /// A replica's proxy is slow.
    Delay,
    /// The wire of the replicas in the namespace is cut, without a FIN.
    Cut,
    /// Only towards them.
    CutIn,
    /// Only from them.
    CutOut,
    /// The wire loses packets.
    Loss,
    /// The holder is asked to step down.
    StepDown,
    /// Everything runs on a busy machine.
    Starve,
}

/// What part of the system a fault strikes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Where {
    Server,
    Slots(Vec<usize>),
    Everywhere,
    Nowhere,
}

/// One fault, with the moments before and after it was put in place, and was taken away.
#[derive(Clone, Debug)]
pub struct Fault {
    pub what: What,
    pub at: Where,
    pub begin: u64,
    pub applied: u64,
    pub heal: u64,
    pub end: u64,
}

impl Fault {
    pub fn strikes(&self, slot: usize) -> bool {
        match &self.at {
            Where::Server | Where::Everywhere => true,
            Where::Slots(slots) => slots.contains(&slot),
            Where::Nowhere => false,
        }
    }

    /// The session is there, and nothing is heard of it.
    pub fn is_silence(&self) -> bool {
        use What::{Cut, CutIn, CutOut, FreezeBackend, FreezeServer, Pause, Stall};
        matches!(self.what, Pause | Stall | Cut | CutIn | CutOut | FreezeServer | FreezeBackend)
    }

    /// News of a session's end may be late because of it.
    pub fn hinders(&self) -> bool {
        self.is_silence() || matches!(self.what, What::Delay | What::Loss | What::Starve)
    }

    /// Sessions end at its beginning.
    pub fn is_death(&self) -> bool {
        use What::{AbortServer, CrashServer, Reset, StopServer, Terminate};
        matches!(self.what, Terminate | Reset | StopServer | AbortServer | CrashServer)
    }

    /// The server hears nothing more of the replica.
    pub fn is_vanishing(&self) -> bool {
        matches!(self.what, What::Pause | What::Stall | What::Cut | What::CutIn | What::CutOut)
    }
}

/// One job from its start to its end.
#[derive(Clone, Debug)]
pub struct Term {
    pub name: usize,
    pub token: i64,
    pub slot: usize,
    pub process: u32,
    pub start: u64,
    /// The lease was held when the job started.
    pub began_held: bool,
    /// The last moment at which it was.
    pub last_held: u64,
    pub told: Option<(u64, bool)>,
    pub stop: Option<u64>,
    /// When it returned, or its process died, or the history ended.
    pub end: u64,
    pub seen: Option<u64>,
}

impl Term {
    pub fn was_told_of_loss(&self) -> bool {
        matches!(self.told, Some((_, true)))
    }
}

/// Terms by start. `killed` tells when processes died; `ended` is the end of the history.
pub fn terms(records: &[Record], killed: &HashMap<u32, u64>, ended: u64) -> Vec<Term> {
    let mut terms: Vec<Term> = Vec::new();
    let mut open = HashMap::<(u32, usize), usize>::new();
    for record in records {
        let key = (record.process, record.name);
        if record.kind == Kind::Start {
            open.insert(key, terms.len());
            terms.push(Term {
                name: record.name,
                token: record.token,
                slot: record.slot,
                process: record.process,
                start: record.at,
                began_held: record.held,
                last_held: if record.held { record.at } else { 0 },
                told: None,
                stop: None,
                end: killed.get(&record.process).copied().unwrap_or(ended),
                seen: None,
            });
            continue;
        }
        let Some(at) = open.get(&key) else { continue };
        let term = &mut terms[*at];
        if term.token != record.token {
            continue;
        }
        match record.kind {
            Kind::Work if record.held => term.last_held = term.last_held.max(record.at),
            Kind::Told => term.told = Some((record.at, record.value == 1)),
            Kind::Seen => term.seen = Some(record.value),
            Kind::Stop => {
                term.stop = Some(record.at);
                term.end = record.at;
            }
            Kind::Work | Kind::Start | Kind::Closed => {}
        }
    }
    terms.sort_by_key(|term| term.start);
    terms
}

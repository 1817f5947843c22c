//! Decides from a history which promises were kept, and how close it was.
//!
//! A bound is judged only where its condition held: a standby that was fit all the time, a server that
//! was reachable, no second fault in the way. Safety (P1, P4, P8, P9) is judged always. Where the
//! machine itself was late, as the nemesis measures with a thread of its own, prompt bounds are
//! extended by as much.

use std::collections::HashMap;

use crate::record::{Kind, Record};
use crate::terms::{FOREVER, Fault, Term, What, terms};
use crate::verdict::Verdict;

const MS: u64 = 1_000_000;
/// P2 and P6, and what a take-over costs beyond its intervals.
pub const PROMPT: u64 = 50 * MS;
/// A signal to a process with many threads takes this long to stop them all.
const SETTLE: u64 = 10 * MS;

/// The options of the replicas, in nanoseconds.
#[derive(Copy, Clone, Debug)]
pub struct Limits {
    pub heartbeat: u64,
    pub query: u64,
    pub retry: u64,
    pub ttl: u64,
    /// The server ends idle sessions by itself: PostgreSQL 14 and later.
    pub idle_limit: bool,
}

impl Limits {
    pub fn window(&self) -> u64 {
        self.heartbeat + self.query
    }

    fn longest_retry(&self) -> u64 {
        self.retry * 12 / 10
    }

    /// How long a replica may take to be a contender again after a fault: a statement that runs
    /// out, the longest pause between attempts to connect, and a first try.
    fn recovery(&self) -> u64 {
        self.query + 2 * self.longest_retry() + 4 * PROMPT
    }

    /// An open guarded transaction of an earlier term is waited for this long.
    fn fence(&self, guarded: bool) -> u64 {
        if guarded { self.query / 2 + PROMPT } else { 0 }
    }

    /// From the last fault to a leader of every name.
    pub fn liveness(&self) -> u64 {
        self.ttl.max(self.window()) + self.recovery() + self.longest_retry() + self.fence(true)
    }
}

/// Everything that the checker looks at.
pub struct Run {
    pub limits: Limits,
    pub slots: usize,
    pub names: usize,
    /// Names whose jobs write under a guard.
    pub guarded: fn(usize) -> bool,
    pub records: Vec<Record>,
    pub faults: Vec<Fault>,
    /// When processes died.
    pub killed: HashMap<u32, u64>,
    /// When the machine itself was late, and for how long.
    pub hiccups: Vec<(u64, u64)>,
    /// Name and token of each guarded row.
    pub rows: Vec<(usize, i64)>,
    /// Locks and sessions that were left at the end.
    pub leaked: Vec<String>,
    /// When the last fault was gone, and when replicas were asked to end.
    pub healed: u64,
    pub ended: u64,
}

pub fn check(run: &Run) -> Verdict {
    let terms = terms(&run.records, &run.killed, run.ended);
    let mut by_name: Vec<Vec<Term>> = vec![Vec::new(); run.names];
    for term in terms {
        by_name[term.name].push(term);
    }
    let mut verdict = Verdict::new(&run.limits);
    verdict.terms = by_name.iter().map(Vec::len).sum();
    for terms in &by_name {
        let one = Name { run, terms };
        one.overlaps(&mut verdict);
        one.tokens(&mut verdict);
        one.guards(&mut verdict);
        one.losses(&mut verdict);
        one.take_overs(&mut verdict);
        one.hand_overs(&mut verdict);
        one.liveness(&mut verdict);
    }
    for record in run.records.iter().filter(|record| record.kind == Kind::Closed) {
        verdict.measure("P11 close", record.value, 2 * run.limits.query + PROMPT, &|| {
            format!("close of {} took {} ms", record.process, record.value / MS)
        });
    }
    verdict.count("no leaked lock or session", run.leaked.len());
    verdict.violations.extend(run.leaked.iter().map(|leak| format!("leaked: {leak}")));
    verdict.finish();
    verdict
}

/// The terms of one name, by start.
struct Name<'a> {
    run: &'a Run,
    terms: &'a [Term],
}

impl Name<'_> {
    /// How late the machine was between the two.
    fn noise(&self, from: u64, to: u64) -> u64 {
        let late = self.run.hiccups.iter().filter(|(at, took)| *at <= to && at + took >= from);
        2 * late.map(|(_, took)| took).sum::<u64>()
    }

    fn hindered(&self, slot: usize, from: u64, to: u64) -> bool {
        let mut faults = self.run.faults.iter();
        faults.any(|f| f.hinders() && f.strikes(slot) && f.begin <= to && f.end >= from)
    }

    /// Nothing strikes the slot in that time, or shortly before.
    fn fit(&self, slot: usize, from: u64, to: u64) -> bool {
        let recovery = self.run.limits.recovery();
        let spoiled = |fault: &Fault| {
            fault.strikes(slot) && fault.begin <= to && fault.end.saturating_add(recovery) >= from
        };
        // A replica does not contend for a name while its own job runs, or shortly after.
        let busy = |term: &Term| {
            term.slot == slot && term.start <= to && term.end.saturating_add(recovery) >= from
        };
        let died = |at: &u64| *at >= from && *at <= to;
        // With one replica there is no other to take over from the one that was killed.
        let alone = self.run.slots == 1 && self.run.killed.values().any(died);
        let hindered = self.run.faults.iter().any(spoiled) || self.terms.iter().any(busy);
        slot < self.run.slots && !hindered && !alone
    }

    /// Somebody other than `slot` could have taken over all the time.
    fn standby(&self, slot: usize, from: u64, to: u64) -> bool {
        // Replicas need a moment after the beginning, and after another's term.
        (0..self.run.slots).any(|other| other != slot && self.fit(other, from, to))
    }

    /// The first job that starts with a lease after `at`.
    fn next(&self, at: u64, but: &Term) -> Option<&Term> {
        let from = self.terms.partition_point(|term| term.start <= at);
        self.terms[from..].iter().find(|term| term.began_held && term.token != but.token)
    }

    fn overlaps(&self, verdict: &mut Verdict) {
        for (at, term) in self.terms.iter().enumerate() {
            for later in self.terms[at + 1..].iter().take_while(|t| t.start < term.last_held) {
                if later.began_held {
                    self.overlap(verdict, term, later);
                }
            }
        }
        verdict.note("P1 P4 overlap, session alive or silent", self.terms.len());
    }

    /// `later` began while `term` still believed in its lease.
    fn overlap(&self, verdict: &mut Verdict, term: &Term, later: &Term) {
        let overlap = term.last_held - later.start;
        let mut deaths = self.run.faults.iter().filter(|fault| {
            let time = fault.begin <= later.start && fault.end >= term.start;
            fault.is_death() && fault.strikes(term.slot) && time
        });
        let tell = || {
            format!(
                "{} ms in which name {} was held by {} (term {}, slot {}) and {} (term {}, slot {})",
                overlap / MS,
                term.name,
                term.process,
                term.token,
                term.slot,
                later.process,
                later.token,
                later.slot
            )
        };
        let Some(death) = deaths.next_back() else {
            return verdict.measure("P1 P4 overlap, session alive or silent", overlap, 0, &tell);
        };
        if self.hindered(term.slot, death.begin, term.last_held) {
            let bound = self.run.limits.window() + SETTLE;
            return verdict.measure("P3 overlap, death unheard of", overlap, bound, &tell);
        }
        let bound = PROMPT + self.noise(death.begin, term.last_held);
        verdict.measure("P2 overlap after a death", overlap, bound, &tell);
    }

    fn tokens(&self, verdict: &mut Verdict) {
        let mut highest: Option<&Term> = None;
        for term in self.terms.iter().filter(|term| term.began_held) {
            if let Some(before) = highest {
                // Of two that began during one overlap, either may write first.
                let apart = term.start - before.start > self.run.limits.window();
                if term.token == before.token || (term.token < before.token && apart) {
                    verdict.violations.push(format!(
                        "P8: name {}: term {} at {} is not greater than {} at {}",
                        term.name, term.token, term.start, before.token, before.start
                    ));
                }
            }
            if highest.is_none_or(|before| before.token < term.token) {
                highest = Some(term);
            }
        }
        verdict.note("P8 tokens grow", self.terms.len());
    }

    fn guards(&self, verdict: &mut Verdict) {
        for term in self.terms {
            let Some(seen) = term.seen else { continue };
            let earlier = self
                .run
                .rows
                .iter()
                .filter(|(name, token)| *name == term.name && *token < term.token);
            let committed = earlier.count() as u64;
            verdict.note("P9 guarded commits", 1);
            if committed != seen {
                verdict.violations.push(format!(
                    "P9: name {}: term {} saw {seen} rows of earlier terms, and there are {committed}",
                    term.name, term.token
                ));
            }
        }
    }

    /// P2 and P3: how soon holders learn.
    fn losses(&self, verdict: &mut Verdict) {
        let window = self.run.limits.window();
        for fault in &self.run.faults {
            let struck = |term: &&Term| {
                term.start < fault.begin && term.end > fault.begin && fault.strikes(term.slot)
            };
            for term in self.terms.iter().filter(struck) {
                let tell = |what: &str| format!("{what}: {fault:?} {term:?}");
                if fault.is_silence() && fault.heal.saturating_sub(fault.applied) > window {
                    // What was believed at the beginning may have been true for that long.
                    let believed = term.last_held.saturating_sub(fault.applied);
                    let bound = window + SETTLE;
                    verdict.measure("P3 believed after silence", believed, bound, &|| {
                        tell("held for too long")
                    });
                }
                if fault.is_death() && term.told.is_none_or(|(at, _)| at > fault.begin) {
                    let over = term.told.map_or(term.end, |(at, _)| at);
                    let from =
                        if fault.what == What::Terminate { fault.begin } else { fault.applied };
                    let took = over.saturating_sub(from);
                    let hindered = self.hindered(term.slot, fault.begin, fault.begin + PROMPT);
                    // The end of its own term came first.
                    let own = term.told.is_none() && took < PROMPT;
                    if !hindered && !own {
                        let bound = PROMPT + self.noise(fault.begin, over);
                        verdict.measure("P2 told of a death", took, bound, &|| tell("told late"));
                    }
                }
            }
        }
    }

    /// P5 and P7: how soon somebody else leads.
    fn take_overs(&self, verdict: &mut Verdict) {
        let limits = &self.run.limits;
        for fault in &self.run.faults {
            let fence = limits.fence((self.run.guarded)(self.terms.first().map_or(0, |t| t.name)));
            let (row, base) = match fault.what {
                _ if fault.is_vanishing() && limits.idle_limit => {
                    ("P5 vanished holder replaced", limits.ttl)
                }
                What::Kill => ("P7 killed holder replaced", 0),
                What::Terminate | What::Reset => ("P7 ended session replaced", 0),
                _ => continue,
            };
            let bound = base + limits.longest_retry() + PROMPT + fence;
            let struck = |term: &&Term| {
                term.start < fault.begin
                    && term.end >= fault.begin
                    && fault.strikes(term.slot)
                    && term.told.is_none_or(|(at, _)| at >= fault.begin)
                    && self.next(term.start, term).is_none_or(|next| next.start >= fault.begin)
            };
            for term in self.terms.iter().filter(struck) {
                let next = self.next(fault.begin, term).map_or(FOREVER, |next| next.start);
                let limit = fault.applied + bound + self.noise(fault.begin, fault.applied + bound);
                let horizon = next.min(limit);
                let lasted = !fault.is_vanishing() || fault.heal >= horizon;
                if lasted
                    && horizon < self.run.ended
                    && self.standby(term.slot, fault.begin, horizon)
                {
                    let took = next.min(self.run.ended).saturating_sub(fault.applied);
                    verdict.measure(row, took, limit - fault.applied, &|| {
                        format!("{row}: {} ms after {fault:?} {term:?}", took / MS)
                    });
                }
            }
        }
    }

    /// P6: the next leader after a job that returned by itself, never before.
    fn hand_overs(&self, verdict: &mut Verdict) {
        let limits = &self.run.limits;
        for term in self.terms.iter().filter(|term| !term.was_told_of_loss() && term.began_held) {
            let Some(stop) = term.stop else { continue };
            let troubled = self.run.faults.iter().any(|fault| {
                fault.strikes(term.slot)
                    && fault.begin <= stop
                    && fault.end.saturating_add(limits.recovery()) >= term.start
            });
            if troubled {
                continue;
            }
            let from = self.terms.partition_point(|other| other.start <= term.start);
            let Some(next) = self.terms[from..].iter().find(|other| other.began_held) else {
                continue;
            };
            if next.start < stop {
                verdict
                    .violations
                    .push(format!("P6: unlocked before the job returned: {term:?} {next:?}"));
                continue;
            }
            let limit = stop + limits.longest_retry() + PROMPT + self.noise(stop, next.start);
            let disturbed = self
                .run
                .faults
                .iter()
                .any(|f| f.strikes(term.slot) && f.begin <= next.start && f.end >= stop);
            if !disturbed && self.standby(term.slot, stop, next.start.min(limit)) {
                verdict.hand_over(next.start - stop, limit - stop, &|| {
                    format!("hand-over took {} ms: {term:?} {next:?}", (next.start - stop) / MS)
                });
            }
        }
    }

    fn liveness(&self, verdict: &mut Verdict) {
        let (healed, bound) = (self.run.healed, self.run.limits.liveness());
        if self.run.ended < healed + bound {
            verdict.violations.push("the run ended before liveness could be judged".into());
            return;
        }
        let leads = |term: &&Term| term.began_held && term.last_held >= healed;
        let first = self.terms.iter().filter(leads).map(|term| term.start).min();
        let took = first.unwrap_or(self.run.ended).saturating_sub(healed);
        verdict.measure("every name led after the last fault", took, bound, &|| {
            format!("a name is led only {} ms after the last fault", took / MS)
        });
    }
}

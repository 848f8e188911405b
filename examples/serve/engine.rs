//! Continuous batching: each step takes the next token of every running request and, with what is left of its tokens,
//! pieces of prompts (chunked prefill). Where no page is left, the request that came last gives its own back, and is
//! computed again later (preemption by recomputation).

use std::collections::VecDeque;

use fmha::Error;

use crate::attention::{Attention, MAX_PAGES, PAGE, Room, Step};
use crate::model::{Model, best};
use crate::pages::{PageId, Pages};

/// Request of a user to the engine.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) prompt: Vec<usize>,
    /// Number of tokens to answer with.
    pub(crate) answer: usize,
    /// Number of the step before which the request comes.
    pub(crate) arrival: usize,
}

/// Request that the engine has accepted.
pub(crate) struct Sequence {
    pub(crate) request: Request,
    /// Tokens of the prompt and of the answer until now.
    pub(crate) tokens: Vec<usize>,
    /// Logits from which each token of the answer was chosen.
    pub(crate) logits: Vec<Vec<f32>>,
    pages: Vec<PageId>,
    /// Number of tokens whose keys and values are in the cache.
    cached: usize,
}

impl Sequence {
    fn missing(&self) -> usize {
        self.tokens.len() - self.cached
    }

    fn is_answered(&self) -> bool {
        self.logits.len() == self.request.answer
    }
}

/// Counts of events in the engine.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) steps: usize,
    /// Number of computed tokens.
    pub(crate) computed: usize,
    /// Number of tokens that were found in the cache.
    pub(crate) shared: usize,
    pub(crate) preempted: usize,
}

pub(crate) struct Engine<'a> {
    model: &'a Model,
    pub(crate) attention: Attention,
    room: Room,
    pub(crate) pages: Pages,
    waiting: VecDeque<Sequence>,
    /// Running requests in the order of arrival, at most one for each slot.
    running: Vec<Sequence>,
    pub(crate) answered: Vec<Sequence>,
    pub(crate) counts: Counts,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(model: &'a Model, attention: Attention, room: Room) -> Self {
        Self {
            model,
            attention,
            room,
            pages: Pages::new(room.pages),
            waiting: VecDeque::new(),
            running: Vec::new(),
            answered: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub(crate) fn submit(&mut self, request: Request) {
        let tokens = request.prompt.clone();
        let (logits, pages) = (Vec::new(), Vec::new());
        self.waiting.push_back(Sequence { request, tokens, logits, pages, cached: 0 });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Runs one step of the model over the tokens that wait.
    ///
    /// # Errors
    /// An error of the device.
    pub(crate) fn step(&mut self) -> Result<(), Error> {
        self.admit();
        let taken = self.schedule();
        let mut table = vec![0i32; (self.room.slots * MAX_PAGES) as usize];
        let (mut tokens, mut cached) = (Vec::new(), Vec::new());
        let slots = self.running.iter().zip(&taken).zip(table.chunks_mut(MAX_PAGES as usize));
        for ((sequence, &count), row) in slots {
            tokens.push(&sequence.tokens[sequence.cached..][..count]);
            cached.push(sequence.cached as i32);
            row.iter_mut().zip(&sequence.pages).for_each(|(entry, &page)| *entry = page as i32);
        }
        tokens.resize(self.room.slots as usize, &[]);
        cached.resize(self.room.slots as usize, 0);
        let logits = self.model.step(&mut self.attention, &Step { tokens, cached, table })?;
        self.counts.steps += 1;
        self.counts.computed += taken.iter().sum::<usize>();
        for ((sequence, count), logits) in self.running.iter_mut().zip(taken).zip(logits) {
            let published = sequence.cached / PAGE as usize;
            sequence.cached += count;
            for page in published..sequence.cached / PAGE as usize {
                self.pages.publish(sequence.pages[page], &sequence.tokens[..(page + 1) * PAGE as usize]);
            }
            if count > 0 && sequence.missing() == 0 {
                sequence.tokens.push(best(&logits));
                sequence.logits.push(logits);
            }
        }
        for at in
            (0..self.running.len()).rev().filter(|&at| self.running[at].is_answered()).collect::<Vec<_>>()
        {
            let mut sequence = self.running.remove(at);
            self.give_back(&mut sequence);
            self.answered.push(sequence);
        }
        Ok(())
    }

    /// Moves waiting requests to free slots. Each begins after the prefix that the cache already has.
    fn admit(&mut self) {
        while self.running.len() < self.room.slots as usize {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            sequence.pages = self.pages.share(&sequence.tokens);
            sequence.cached = sequence.pages.len() * PAGE as usize;
            self.counts.shared += sequence.cached;
            self.running.push(sequence);
        }
    }

    /// Number of tokens of each running request in this step. A request that is answering gets one; the rest goes to
    /// the others, the earliest first. Pages for all of them are reserved.
    fn schedule(&mut self) -> Vec<usize> {
        let mut taken = vec![0; self.running.len()];
        let mut left = self.room.tokens as usize;
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|&at| (self.running[at].missing() > 1, at));
        for at in order {
            // A request that was preempted for another has left its slot.
            if at < self.running.len() {
                taken[at] = self.reserve(at, self.running[at].missing().min(left));
                left -= taken[at];
            }
        }
        taken.truncate(self.running.len());
        taken
    }

    /// Reserves pages for the next `count` tokens of a running request. Returns for how many there are pages.
    fn reserve(&mut self, at: usize, count: usize) -> usize {
        let wanted = (self.running[at].cached + count).div_ceil(PAGE as usize);
        while self.running[at].pages.len() < wanted {
            match self.pages.take() {
                Some(page) => self.running[at].pages.push(page),
                None if at + 1 < self.running.len() => self.preempt_last(),
                None => break,
            }
        }
        let sequence = &self.running[at];
        count.min(sequence.pages.len() * PAGE as usize - sequence.cached)
    }

    fn preempt_last(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            self.give_back(&mut sequence);
            self.waiting.push_front(sequence);
            self.counts.preempted += 1;
        }
    }

    /// The last page is released first, since a prefix is useful only while the pages before it exist.
    fn give_back(&mut self, sequence: &mut Sequence) {
        sequence.pages.drain(..).rev().for_each(|page| self.pages.release(page));
        sequence.cached = 0;
    }
}

//! Pages of the cache: free ones, the users of each, and pages whose prefix a later request may share.

use std::collections::{HashMap, VecDeque};

use crate::attention::PAGE;

/// A page's number.
pub(crate) type PageId = usize;

struct Page {
    /// Number of requests whose block tables contain the page.
    users: u32,
    /// Tokens from the sequence's first to this page's last, if the page is full and may be shared.
    prefix: Option<Vec<usize>>,
}

pub(crate) struct Pages {
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// Pages with a prefix and without a user, the least recently used first.
    idle: VecDeque<PageId>,
    by_prefix: HashMap<Vec<usize>, PageId>,
    /// Number of idle pages that were given to another request.
    pub(crate) evicted: usize,
}

impl Pages {
    pub(crate) fn new(count: u32) -> Self {
        let page = || Page { users: 0, prefix: None };
        Self {
            pages: (0..count).map(|_| page()).collect(),
            free: (0..count as usize).rev().collect(),
            idle: VecDeque::new(),
            by_prefix: HashMap::new(),
            evicted: 0,
        }
    }

    /// Pages that hold the longest known prefix of `tokens`, without the last token, whose logits are needed. The
    /// caller must release them.
    pub(crate) fn share(&mut self, tokens: &[usize]) -> Vec<PageId> {
        let full = (tokens.len() - 1) / PAGE as usize;
        let prefixes = (1..=full).map(|pages| &tokens[..pages * PAGE as usize]);
        let shared: Vec<PageId> = prefixes.map_while(|prefix| self.by_prefix.get(prefix).copied()).collect();
        for &page in &shared {
            self.pages[page].users += 1;
            self.idle.retain(|&idle| idle != page);
        }
        shared
    }

    /// Takes a page for one request: a free one, otherwise the least recently used idle one.
    pub(crate) fn take(&mut self) -> Option<PageId> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let page = self.idle.pop_front()?;
                if let Some(prefix) = self.pages[page].prefix.take() {
                    self.by_prefix.remove(&prefix);
                }
                self.evicted += 1;
                page
            }
        };
        self.pages[page].users = 1;
        Some(page)
    }

    /// Releases the page for one of its users.
    pub(crate) fn release(&mut self, page: PageId) {
        let state = &mut self.pages[page];
        state.users -= 1;
        match (state.users, &state.prefix) {
            (0, Some(_)) => self.idle.push_back(page),
            (0, None) => self.free.push(page),
            _ => {}
        }
    }

    /// Marks the page as full, with `prefix` as all tokens up to its last. Other requests may then share it, unless
    /// another page holds the same prefix.
    pub(crate) fn publish(&mut self, page: PageId, prefix: &[usize]) {
        if self.pages[page].prefix.is_none() && !self.by_prefix.contains_key(prefix) {
            self.pages[page].prefix = Some(prefix.to_vec());
            self.by_prefix.insert(prefix.to_vec(), page);
        }
    }
}

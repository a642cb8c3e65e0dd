package fold

import "time"

// quiet lets one line a minute through while the same trouble goes on.
type quiet struct{ last time.Time }

func (q *quiet) allow(now time.Time) bool {
	if !q.last.IsZero() && now.Sub(q.last) < time.Minute {
		return false
	}
	q.last = now
	return true
}

func (q *quiet) reset() { q.last = time.Time{} }

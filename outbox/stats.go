package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Stats counts records by state. Each is in exactly one.
type Stats struct {
	Pending      int64
	PendingBytes int64 // of data, type, subject and topic
	Shipped      int64
	Withheld     int64
	Dead         int64
	Expired      int64
	OldestUS     int64 // recorded time of the oldest pending record; 0: none
}

// Stats counts the records of one tenant, or of all for "".
func (o *Outbox) Stats(ctx context.Context, tenant string) (Stats, error) {
	all, err := o.byTenant(ctx)
	if err != nil {
		return Stats{}, err
	}
	var sum Stats
	for name, s := range all {
		if tenant != "" && name != tenant {
			continue
		}
		sum.Pending += s.Pending
		sum.PendingBytes += s.PendingBytes
		sum.Shipped += s.Shipped
		sum.Withheld += s.Withheld
		sum.Dead += s.Dead
		sum.Expired += s.Expired
		if s.OldestUS != 0 && (sum.OldestUS == 0 || s.OldestUS < sum.OldestUS) {
			sum.OldestUS = s.OldestUS
		}
	}
	return sum, nil
}

// byTenant has an entry for every tenant that has a run. All numbers are of one snapshot.
func (o *Outbox) byTenant(ctx context.Context) (map[string]Stats, error) {
	tx, err := o.store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("count records: %w", err)
	}
	defer tx.Rollback()
	rows, err := tx.QueryContext(ctx, `SELECT tenant,
		sum(max(exportable - shipped, 0)), sum(iif(shipped < exportable, export_bytes - shipped_bytes, 0)),
		sum(shipped - fork_lsn), sum(head_lsn - max(exportable, shipped)) FROM branch GROUP BY tenant`)
	if err != nil {
		return nil, fmt.Errorf("count records: %w", err)
	}
	defer rows.Close()
	all := map[string]Stats{}
	for rows.Next() {
		var tenant string
		var s Stats
		if err := rows.Scan(&tenant, &s.Pending, &s.PendingBytes, &s.Shipped, &s.Withheld); err != nil {
			return nil, fmt.Errorf("count records: %w", err)
		}
		all[tenant] = s
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("count records: %w", err)
	}
	// Dead and expired ones lie below the shipped mark: they left the queue without a PUBACK.
	rows, err = tx.QueryContext(ctx, `SELECT b.tenant, d.reason, count(*) FROM dead d JOIN branch b ON b.id = d.branch
		WHERE d.requeued_us IS NULL GROUP BY b.tenant, d.reason`)
	if err != nil {
		return nil, fmt.Errorf("count dead records: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var tenant, reason string
		var n int64
		if err := rows.Scan(&tenant, &reason, &n); err != nil {
			return nil, fmt.Errorf("count dead records: %w", err)
		}
		s := all[tenant]
		s.Shipped -= n
		if reason == "expired" {
			s.Expired += n
		} else {
			s.Dead += n
		}
		all[tenant] = s
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("count dead records: %w", err)
	}
	// Handed-over inputs that a rewind of their creator withheld, each in its own row.
	rows, err = tx.QueryContext(ctx, `SELECT b.tenant, sum(o.lsn > b.shipped), sum(o.lsn <= b.shipped), sum(iif(o.lsn > b.shipped, length(o.data) + length(CAST(o.type AS BLOB)), 0))
		FROM outbox o INDEXED BY outbox_creator JOIN branch b ON b.id = o.branch WHERE o.creator_branch IS NOT NULL AND o.withheld_us IS NOT NULL GROUP BY b.tenant`)
	if err != nil {
		return nil, fmt.Errorf("count withheld hand-overs: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var tenant string
		var ahead, passed, bytes int64
		if err := rows.Scan(&tenant, &ahead, &passed, &bytes); err != nil {
			return nil, fmt.Errorf("count withheld hand-overs: %w", err)
		}
		s := all[tenant]
		s.Pending, s.PendingBytes, s.Shipped, s.Withheld = s.Pending-ahead, s.PendingBytes-bytes, s.Shipped-passed, s.Withheld+ahead+passed
		all[tenant] = s
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("count withheld hand-overs: %w", err)
	}
	rows, err = tx.QueryContext(ctx, `SELECT tenant, id, shipped, head_lsn, tail_id, shipped_us, backlog_id FROM branch WHERE shipped < exportable`)
	if err != nil {
		return nil, fmt.Errorf("find oldest pending record: %w", err)
	}
	defer rows.Close()
	type backlog struct {
		tenant                                          string
		id, shipped, head, tail, notBeforeUS, notBefore int64
	}
	var list []backlog
	for rows.Next() {
		var b backlog
		if err := rows.Scan(&b.tenant, &b.id, &b.shipped, &b.head, &b.tail, &b.notBeforeUS, &b.notBefore); err != nil {
			return nil, fmt.Errorf("find oldest pending record: %w", err)
		}
		list = append(list, b)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("find oldest pending record: %w", err)
	}
	// No pending record is older than its branch's last shipped one, nor than the one that began the backlog, and ids are
	// in order of time. So few branches need a look.
	slices.SortFunc(list, func(a, b backlog) int { return cmp.Compare(a.notBeforeUS, b.notBeforeUS) })
	oldest := map[string]int64{} // outbox.id by tenant
	for _, b := range list {
		s := all[b.tenant]
		if s.OldestUS != 0 && (b.notBeforeUS >= s.OldestUS || b.notBefore > oldest[b.tenant]) {
			continue
		}
		start := b.tail
		if mark := (b.shipped + stride) / stride * stride; mark <= b.head {
			if err := tx.QueryRowContext(ctx, "SELECT id FROM outbox WHERE branch = ? AND lsn = ? AND lsn % 16 = 0", b.id, mark).Scan(&start); err != nil {
				return nil, fmt.Errorf("find oldest pending record: %w", err)
			}
		}
		var id, at int64
		err := tx.QueryRowContext(ctx, `WITH RECURSIVE walk (id, prev_id, lsn) AS (
			SELECT id, prev_id, lsn FROM outbox WHERE id = ?1
			UNION ALL SELECT o.id, o.prev_id, o.lsn FROM walk w JOIN outbox o ON o.id = w.prev_id WHERE w.lsn > ?2 + 1)
			SELECT o.id, o.recorded_us FROM walk w JOIN outbox o ON o.id = w.id WHERE w.lsn = ?2 + 1`, start, b.shipped).Scan(&id, &at)
		if err != nil {
			return nil, fmt.Errorf("find oldest pending record: %w", err)
		}
		if s.OldestUS == 0 || at < s.OldestUS {
			s.OldestUS = at
			all[b.tenant], oldest[b.tenant] = s, id
		}
	}
	return all, nil
}

var (
	descPending  = prometheus.NewDesc("postrider_outbox_pending_records", "Records waiting for the broker's confirmation.", []string{"tenant"}, nil)
	descOldest   = prometheus.NewDesc("postrider_outbox_oldest_pending_timestamp_seconds", "Recorded time of the oldest pending record; 0: none.", []string{"tenant"}, nil)
	descBytes    = prometheus.NewDesc("postrider_outbox_pending_bytes", "Size of the pending records' contents.", nil, nil)
	descDead     = prometheus.NewDesc("postrider_outbox_dead_records", "Dead letters of the outbox.", nil, nil)
	descWithheld = prometheus.NewDesc("postrider_outbox_withheld_records", "Records that a rewind keeps from being shipped.", nil, nil)
)

// Describe implements prometheus.Collector.
func (o *Outbox) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descPending, descOldest, descBytes, descDead, descWithheld} {
		ch <- d
	}
}

// Collect implements prometheus.Collector: the figures are read from the database at each scrape.
func (o *Outbox) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	all, err := o.byTenant(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descPending, err)
		return
	}
	var sum Stats
	for tenant, s := range all {
		ch <- prometheus.MustNewConstMetric(descPending, prometheus.GaugeValue, float64(s.Pending), tenant)
		ch <- prometheus.MustNewConstMetric(descOldest, prometheus.GaugeValue, float64(s.OldestUS)/1e6, tenant)
		sum.PendingBytes += s.PendingBytes
		sum.Dead += s.Dead
		sum.Withheld += s.Withheld
	}
	ch <- prometheus.MustNewConstMetric(descBytes, prometheus.GaugeValue, float64(sum.PendingBytes))
	ch <- prometheus.MustNewConstMetric(descDead, prometheus.GaugeValue, float64(sum.Dead))
	ch <- prometheus.MustNewConstMetric(descWithheld, prometheus.GaugeValue, float64(sum.Withheld))
}

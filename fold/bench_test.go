package fold

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"postrider/internal/record"
)

// stream makes n events of 300 B, round robin over runs of several tenants; every 64th is followed by a rewind of its run.
func stream(n, runs int) []record.Record {
	type head struct {
		branch   record.BranchKey
		gen, lsn int64
	}
	heads := make([]head, runs)
	list := make([]record.Record, 0, n)
	filler := strings.Repeat("x", 280)
	for i := range n {
		h := &heads[i%runs]
		if h.gen == 0 {
			h.gen = 1
			h.branch = record.BranchKey{Tenant: fmt.Sprint("t", i%8), Run: fmt.Sprint("r", i), Branch: fmt.Sprintf("01%024d", i)}
		}
		h.lsn++
		r := record.Record{
			Node: "n1", Key: h.branch, LSN: h.lsn, PrevLSN: h.lsn - 1, Gen: h.gen, Epoch: 1, Step: h.lsn, Kind: record.Event,
			Type: "counted", Data: fmt.Appendf(nil, `{"n":%d,"x":%q}`, i, filler), Occurred: int64(i), Recorded: int64(i),
		}
		switch {
		case h.lsn == 1:
			r.Type = record.TypeRunStarted
		case h.lsn%64 == 0:
			parent := h.branch.Branch
			h.gen++
			h.branch.Branch = fmt.Sprintf("01%024d", i)
			fork := h.lsn - 10
			h.lsn = fork + 1
			o := record.BranchOpened{Parent: parent, ForkStep: fork, ForkLSN: fork, Reason: "rewind"}
			r.Key, r.Gen, r.LSN, r.PrevLSN = h.branch, h.gen, fork+1, fork
			r.Type, r.Data = record.TypeBranchOpened, o.AppendData(nil)
		}
		list = append(list, r)
	}
	return list
}

func BenchmarkApply(b *testing.B) {
	for _, runs := range []int{1, 1000} {
		b.Run(fmt.Sprintf("runs=%d", runs), func(b *testing.B) {
			f := openNew(b, Options{})
			batches := chunk(arrived(stream(b.N*1024, runs)), 1024)
			b.ReportAllocs()
			b.ResetTimer()
			for _, batch := range batches {
				if _, err := f.Apply(context.Background(), batch); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)*1024/b.Elapsed().Seconds(), "records/s")
		})
	}
}

func BenchmarkApplyDuplicates(b *testing.B) {
	f := openNew(b, Options{})
	batches := chunk(arrived(stream(64*1024, 1000)), 1024)
	for _, batch := range batches {
		if _, err := f.Apply(context.Background(), batch); err != nil {
			b.Fatal(err)
		}
	}
	n := 0
	for b.Loop() {
		if _, err := f.Apply(context.Background(), batches[n%len(batches)]); err != nil {
			b.Fatal(err)
		}
		n++
	}
	b.ReportMetric(float64(n)*1024/b.Elapsed().Seconds(), "records/s")
}

func BenchmarkVerify(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		for _, runs := range []int{100, n / 10} {
			b.Run(fmt.Sprintf("records=%d/runs=%d", n, runs), func(b *testing.B) {
				f := openNew(b, Options{})
				list := stream(n, runs)
				for _, batch := range chunk(arrived(append(list[:n/2:n/2], list[n/2+3:]...)), 8192) {
					if _, err := f.Apply(context.Background(), batch); err != nil {
						b.Fatal(err)
					}
				}
				for b.Loop() {
					verify(b, f)
				}
				b.Logf("%+v", *verify(b, f))
			})
		}
	}
}

func chunk(list []Arrived, size int) (chunks [][]Arrived) {
	for len(list) > 0 {
		n := min(size, len(list))
		chunks = append(chunks, list[:n])
		list = list[n:]
	}
	return chunks
}

package thompson

import (
	"math"
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/mat"
	"pgregory.net/rapid"
)

func drawVector(t *rapid.T, what string) (x banditVector) {
	for i := range x {
		x[i] = rapid.Float64Range(-1, 1).Draw(t, what)
	}
	return x
}

func TestLinearBanditSamplesAroundItsMean(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prior := &banditPrior{lambda: rapid.Float64Range(0.1, 10).Draw(t, "lambda"), theta: drawVector(t, "theta")}
		l := newLinearBandit(prior)
		for range rapid.IntRange(0, 30).Draw(t, "rewards") {
			x := drawVector(t, "x")
			l.forget(rapid.Float64Range(0, 1).Draw(t, "keep"), prior)
			l.learn(&x, rapid.Float64Range(0, 1).Draw(t, "reward"))
		}
		x := drawVector(t, "asked")
		var weights mat.VecDense
		if err := weights.SolveVec(mat.NewSymDense(banditDim, append([]float64(nil), l.a[:]...)), mat.NewVecDense(banditDim, append([]float64(nil), l.b[:]...))); err != nil {
			t.Skip("hardly to be solved")
		}
		want := mat.Dot(&weights, mat.NewVecDense(banditDim, x[:]))
		var none banditVector
		if got := l.sample(&x, &none, 1); math.Abs(got-want) > 1e-6*max(1, math.Abs(want)) {
			t.Fatalf("mean %v, want %v", got, want)
		}
		z := drawVector(t, "z")
		for i := range none {
			none[i] = -z[i]
		}
		if a, b := l.sample(&x, &z, 0.5), l.sample(&x, &none, 0.5); math.Abs((a+b)/2-want) > 1e-6*max(1, math.Abs(want)) {
			t.Fatalf("%v and %v are not around %v", a, b, want)
		}
		l.forget(0, prior)
		if got := l.sample(&x, &banditVector{}, 1); math.Abs(got-dotVectors(&x, &prior.theta)) > 1e-6 {
			t.Fatalf("forgotten, it expects %v, not what it did at first", got)
		}
	})
}

func dotVectors(a, b *banditVector) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

func TestLinearBanditsSpreadIsThatOfItsCovariance(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	l := newLinearBandit(&banditPrior{lambda: 2})
	x := banditVector{1, 0.5, 0.2, 0, 0.3, 0.6, 0.1, 0.9, 0.4}
	for range 5 {
		l.learn(&x, 1)
	}
	const draws, v = 100_000, 0.25
	sum, squares := 0.0, 0.0
	for range draws {
		var z banditVector
		for i := range z {
			z[i] = random.NormFloat64()
		}
		s := l.sample(&x, &z, v)
		sum, squares = sum+s, squares+s*s
	}
	xx := dotVectors(&x, &x)
	mean, variance := sum/draws, squares/draws-sum/draws*sum/draws
	if want := 5 * xx / (2 + 5*xx); math.Abs(mean-want) > 0.002 {
		t.Errorf("mean %v, want %v", mean, want)
	}
	if want := v * v * xx / (2 + 5*xx); math.Abs(variance/want-1) > 0.02 { // of v²·xᵀA⁻¹x
		t.Errorf("variance %v, want %v", variance, want)
	}
}

func TestLinearBanditCopesWithMatricesThatHaveNoFactors(t *testing.T) {
	l := newLinearBandit(&banditPrior{lambda: 1, theta: banditVector{0.5}})
	l.a[0], l.a[banditDim+1] = -1, 1e-7 // the latter is helped by jitter
	x, z := banditVector{0, 0, 1}, banditVector{1, 1, 1, 1, 1, 1, 1, 1, 1}
	if s := l.sample(&x, &z, 0.25); l.eigen == nil || math.Abs(math.Abs(s)-0.25) > 1e-9 {
		t.Errorf("sample %v", s)
	}
	l.a[0], l.factored = math.NaN(), false
	if s := l.sample(&x, &z, 0.25); !math.IsNaN(s) {
		t.Errorf("of nothing sensible it samples %v", s)
	}
	p := mustPolicy(t, "none")
	if s := p.score(&requestTerms{}, &candidate{loadFactor: 1}, math.NaN(), 0.5); s != -1e9 {
		t.Errorf("which scores %v", s)
	}
}

func TestSoftmaxIsDefinedForAnyScores(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scores := rapid.SliceOfN(rapid.SampledFrom([]float64{-1e9, -3, -0.1, 0, 0.1, 700, 1e300, math.Inf(1), math.NaN()}), 1, 9).Draw(t, "scores")
		chances := softmaxOf(nil, scores, rapid.SampledFrom([]float64{0, 0.05, 1, 2}).Draw(t, "temperature"))
		sum := 0.0
		for _, c := range chances {
			sum += c
		}
		if math.Abs(sum-1) > 1e-9 {
			t.Fatalf("chances %v", chances)
		}
		if i := drawFrom(chances, rapid.Float64Range(0, 1).Draw(t, "draw")); i < 0 || i >= len(scores) {
			t.Fatalf("drawn %d", i)
		}
	})
}
